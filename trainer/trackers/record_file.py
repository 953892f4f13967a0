"""Records in a file of lines, in which every step is once: what JSON lines and CSV have in common."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from .base import RunInfo, Tracker
from .line_file import LocalLineFile, RemoteLineFile, open_line_file

Record = dict[str, Any]

RESERVED = ("step", "epoch", "time", "attempt")
"""What every record begins with; a metric of such a name is left out."""


class RecordFile(Tracker):
    """Writes each record to the file before `log` returns, and those of the same step as one.

    A run that resumes after step 50, or goes back to it, drops the records of later steps, and a run that begins anew
    drops all, by one atomic replacement.

    Args:
        path: of the file, or an fsspec URI; by default `filename` in the run directory, and nothing is written where a
            run has none. An object of a store cannot be appended to: it is written whole at each record.
    """

    filename: str

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._path = None if path is None else os.fspath(path)
        self._file: LocalLineFile | RemoteLineFile | None = None
        self._attempt = 1
        self._last: Record = {}

    def decode(self, lines: Sequence[str]) -> list[Record]:
        """Returns the records of a file, without lines that are none."""
        raise NotImplementedError

    def encode(self, records: Sequence[Record]) -> list[str]:
        """Returns the lines of a whole file."""
        raise NotImplementedError

    def line(self, record: Record) -> str | None:
        """Returns the line of one more record, or None if it does not fit the file, which then is written anew."""
        raise NotImplementedError

    def start(self, run: RunInfo, *, step: int) -> None:
        """Opens the file, without the records that this attempt will write again."""
        path = self._path or (run.run_dir and f"{run.run_dir.rstrip('/')}/{self.filename}")
        if path:
            self._attempt = run.attempt
            self._file = open_line_file(path)
            self._replace(self.decode(self._file.read()) if run.resumed else [], until=step)

    def log(self, metrics: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Appends a record, or completes the last one if it is of the same step."""
        if self._file is None:
            return
        again = self._last.get("step") == step
        values = {**self._last, **metrics} if again else dict(metrics)
        first = {"step": step, "epoch": epoch, "time": round(time.time(), 3), "attempt": self._attempt}
        # In front, and not to be had by a metric of such a name.
        record = first | values | first
        line = self.line(record)
        if line is None:
            before = self.decode(self._file.read())
            self._file.replace(self.encode([*(before[:-1] if again else before), record]))
        elif again:
            self._file.replace_last(line)
        else:
            self._file.append(line)
        self._last = record

    def rewind(self, step: int) -> None:
        """Drops the records of later steps."""
        if self._file is not None:
            self._replace(self.decode(self._file.read()), until=step)

    def finish(self, status: str) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _replace(self, records: Sequence[Record], *, until: int) -> None:
        assert self._file is not None
        kept = [record for record in records if record["step"] <= until]
        self._file.replace(self.encode(kept))
        self._last = kept[-1] if kept else {}
