"""Records as JSON lines in one file, which no kill, restart or resume leaves with a broken line or a doubled step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from typing import Any

from .line_file import open_line_file
from .record_file import Record, RecordFile

_ENCODER = json.JSONEncoder(allow_nan=False)


class JsonlTracker(RecordFile):
    """Writes one JSON object per step, `{"step": 50, "epoch": 0, "time": ..., "attempt": 1, "train/loss": ...}`.

    Every record is in the file when `log` returns. Records of the same step are merged into one line. A run that
    resumes after step 50, or goes back to it, drops the lines of later steps, and a run that begins anew drops all, by
    one atomic replacement. JSON has no NaN: values that are not finite are the strings "NaN", "Infinity" and
    "-Infinity", which `float` understands, and `read_records` turns back.

    Args:
        path: of the file, or an fsspec URI; by default `metrics.jsonl` in the run directory, and nothing is written
            where a run has none. An object of a store cannot be appended to: it is written whole at each record.

    Example:
        >>> Digits(config, trackers=[JsonlTracker("logs/digits.jsonl")]).fit().status
        'completed'
    """

    filename = "metrics.jsonl"

    def decode(self, lines: Sequence[str]) -> list[Record]:
        """Returns the records of a file."""
        return [record for line in lines if (record := _parse(line))]

    def encode(self, records: Sequence[Record]) -> list[str]:
        """Returns one line for each record."""
        return [self.line(record) for record in records]

    def line(self, record: Record) -> str:
        """Returns a record as JSON."""
        try:
            return _ENCODER.encode(record)
        except ValueError:
            return _ENCODER.encode({name: _finite(value) for name, value in record.items()})


def read_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads the records of a file that may still be written to: numbers as floats, a line cut short left out.

    Args:
        path: of the file, or an fsspec URI; no file is no records.

    Example:
        >>> [record["step"] for record in read_records("runs/digits/metrics.jsonl")]
        [4]
    """
    return [record for line in open_line_file(os.fspath(path)).read() if (record := _parse(line))]


def _parse(line: str) -> Record | None:
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
