"""Records as JSON lines in one file, which no kill, restart or resume leaves with a broken line or a doubled step."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from typing import Any

from .base import RunInfo, Tracker
from .lines import LocalLines, RemoteLines, open_lines

_RESERVED = ("step", "epoch", "time", "attempt")


class JsonlTracker(Tracker):
    """Writes one JSON object per step, `{"step": 50, "epoch": 0, "time": ..., "attempt": 1, "train/loss": ...}`.

    Every record is in the file when `log` returns. Records of the same step are merged into one line. A run that
    resumes after step 50, or goes back to it, drops the lines of later steps, and a run that begins anew drops all, by
    one atomic replacement. JSON has no NaN: values that are not finite are the strings "NaN", "Infinity" and
    "-Infinity", which `float` understands, and `read_records` turns back.

    Args:
        path: of the file, or an fsspec URI; by default `metrics.jsonl` in the run directory, and nothing is written
            where a run has none. An object of a store cannot be appended to: it is written whole at each record.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._path = None if path is None else os.fspath(path)
        self._file: LocalLines | RemoteLines | None = None
        self._attempt = 1
        self._last: dict[str, Any] = {}

    def start(self, run: RunInfo, *, step: int) -> None:
        """Opens the file, without the lines that this attempt will write again."""
        path = self._path or (run.run_dir and f"{run.run_dir.rstrip('/')}/metrics.jsonl")
        if not path:
            return
        self._attempt = run.attempt
        self._file = open_lines(path)
        self._keep(self._file.read() if run.resumed else [], until=step)

    def log(self, metrics: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Appends a record, or completes the last one if it is of the same step."""
        if self._file is None:
            return
        again = self._last.get("step") == step
        record = {**(self._last if again else {}), **metrics}
        record = {"step": step, "epoch": epoch, "time": round(time.time(), 3), "attempt": self._attempt} | {
            name: value for name, value in record.items() if name not in _RESERVED
        }
        line = json.dumps({name: _finite(value) for name, value in record.items()}, allow_nan=False)
        self._file.replace_last(line) if again else self._file.append(line)
        self._last = record

    def rewind(self, step: int) -> None:
        """Drops the lines of later steps."""
        if self._file is not None:
            self._keep(self._file.read(), until=step)

    def finish(self, status: str) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _keep(self, lines: list[str], *, until: int) -> None:
        assert self._file is not None
        kept = [(line, record) for line in lines if (record := _parse(line)) and record["step"] <= until]
        self._file.replace([line for line, _ in kept])
        self._last = kept[-1][1] if kept else {}


def read_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads the records of a file that may still be written to: numbers as floats, a line cut short left out.

    Args:
        path: of the file, or an fsspec URI; no file is no records.
    """
    return [record for line in open_lines(os.fspath(path)).read() if (record := _parse(line))]


def _parse(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None  # A kill cut it short.
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    return {
        name: float(value) if value in ("NaN", "Infinity", "-Infinity") else value for name, value in record.items()
    }


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
