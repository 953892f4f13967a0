"""Write records as JSON lines; kills and resumes leave neither broken lines nor duplicate steps."""

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
    resumes after step 50, or rolls back to it, drops the lines of later steps, and a new run drops all, by one atomic
    replacement. JSON has no NaN: non-finite values are the strings "NaN", "Infinity" and "-Infinity", which `float`
    accepts and `read_records` converts back.

    Args:
        path: local path or fsspec URI; by default `metrics.jsonl` in the run directory; without either nothing is
            written. In an object store, which cannot append, the file is rewritten at each record.

    Example:
        >>> Digits(config, trackers=[JsonlTracker("logs/digits.jsonl")]).fit().status
        'completed'
    """

    filename = "metrics.jsonl"

    def decode(self, lines: Sequence[str]) -> list[Record]:
        """Return the records of a file."""
        return [record for line in lines if (record := _parse(line))]

    def encode(self, records: Sequence[Record]) -> list[str]:
        """Return one line for each record."""
        return [self.line(record) for record in records]

    def line(self, record: Record) -> str:
        """Return a record as JSON."""
        try:
            return _ENCODER.encode(record)
        except ValueError:
            return _ENCODER.encode({name: _finite(value) for name, value in record.items()})


def read_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the records of a file that may still be written to; an incomplete last line is left out.

    Args:
        path: local path or fsspec URI; a missing file has no records.

    Example:
        >>> [record["step"] for record in read_records("runs/digits/metrics.jsonl")]
        [4]
    """
    return [record for line in open_line_file(os.fspath(path)).read() if (record := _parse(line))]


def _parse(line: str) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None  # Cut short by a kill.
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    return {
        name: float(value) if value in ("NaN", "Infinity", "-Infinity") else value for name, value in record.items()
    }


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
