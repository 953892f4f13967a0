"""Base of the JSON lines and CSV trackers: records in a file of lines, one per step."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from .base import RunInfo, Tracker
from .line_file import LocalLineFile, RemoteLineFile, open_line_file

Record = dict[str, Any]

RESERVED = ("step", "epoch", "time", "attempt")
"""The first fields of every record; a metric with such a name is left out."""


class RecordFile(Tracker):
    """Writes each record to the file before `log` returns; merges records of the same step.

    A run that resumes after step 50, or rolls back to it, drops the records of later steps, and a new run drops all, by
    one atomic replacement.

    Args:
        path: local path or fsspec URI; by default `filename` in the run directory; without either nothing is written.
            In an object store, which cannot append, subclasses that do not override `start` and `log`
            rewrite the file at each record.
    """

    filename: str

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._path = None if path is None else os.fspath(path)
        self._file: LocalLineFile | RemoteLineFile | None = None
        self._attempt = 1
        self._last: Record = {}

    def decode(self, lines: Sequence[str]) -> list[Record]:
        """Return the records of a file; ignore invalid lines."""
        raise NotImplementedError

    def encode(self, records: Sequence[Record]) -> list[str]:
        """Return the lines of a whole file."""
        raise NotImplementedError

    def line(self, record: Record) -> str | None:
        """Return the line to append for a record, or None if the file must be rewritten for it."""
        raise NotImplementedError

    def start(self, run: RunInfo, *, step: int) -> None:
        """Open the file and drop the records that this attempt will write again."""
        if path := self._resolve(run):
            self._attempt = run.attempt
            self._file = open_line_file(path)
            self._replace(self.decode(self._file.read()) if run.resumed else [], until=step)

    def log(self, metrics: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Append a record, or merge it into the last one if the step is the same."""
        if self._file is None:
            return
        again = self._last.get("step") == step
        values = {**self._last, **metrics} if again else dict(metrics)
        first = {"step": step, "epoch": epoch, "time": round(time.time(), 3), "attempt": self._attempt}
        # Twice, so that these fields come first and also override metrics of the same names.
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
        """Drop the records of later steps."""
        if self._file is not None:
            self._replace(self.decode(self._file.read()), until=step)

    def finish(self, status: str) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _resolve(self, run: RunInfo) -> str | None:
        return self._path or (run.run_dir and f"{run.run_dir.rstrip('/')}/{self.filename}")

    def _replace(self, records: Sequence[Record], *, until: int) -> None:
        assert self._file is not None
        kept = [record for record in records if record["step"] <= until]
        self._file.replace(self.encode(kept))
        self._last = kept[-1] if kept else {}
