"""Write records as JSON lines; kills and resumes leave neither broken lines nor duplicate steps."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .base import RunInfo
from .line_file import LocalLineFile
from .record_file import Record, RecordFile
from .segments import SegmentWriter, read_segments

_ENCODER = json.JSONEncoder(allow_nan=False)
# In segments, which are written once, a line with this field drops the records of later steps before it.
_REWOUND_TO = "rewound_to"
_FINISH_TIMEOUT_S = 15.0


class JsonlTracker(RecordFile):
    """Writes one JSON object per step, `{"step": 50, "epoch": 0, "time": ..., "attempt": 1, "train/loss": ...}`.

    On a disk every record is in the file when `log` returns. Records of the same step are merged into one line. A run
    that resumes after step 50, or rolls back to it, drops the lines of later steps, and a new run drops all, by one
    atomic replacement. JSON has no NaN: non-finite values are the strings "NaN", "Infinity" and "-Infinity", which
    `float` accepts and `read_records` converts back.

    An object store cannot append: there a background thread writes the records of a few seconds as one segment,
    `metrics-00001.jsonl`, `metrics-00002.jsonl` and so on, which `read_records` reads as one file. A slow or failing
    store does not delay training: up to 16 MiB of records are kept in memory and retried. Checkpoints contain the
    records that are not yet written, so that a killed run resumes with all of them. `finish` waits for up to 15 seconds
    and warns about records that are lost.

    Args:
        path: local path or fsspec URI; by default `metrics.jsonl` in the run directory; without either nothing is
            written.

    Example:
        >>> Digits(config, trackers=[JsonlTracker("logs/digits.jsonl")]).fit().status
        'completed'
    """

    filename = "metrics.jsonl"

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        super().__init__(path)
        self._segments: SegmentWriter | None = None
        self._uri = ""
        self._restored: dict[str, Any] = {}

    def start(self, run: RunInfo, *, step: int) -> None:
        """Open the file and drop the records that this attempt will write again."""
        uri = self._resolve(run)
        if uri is None or not _is_remote(uri):
            super().start(run, step=step)
            return
        self._attempt, self._uri = run.attempt, uri
        self._segments = SegmentWriter(uri)
        self._segments.append(_ENCODER.encode({_REWOUND_TO: step if run.resumed else -1}), always=True)
        # They may have been written after all: readers merge records of the same step.
        if run.resumed and self._restored.get("uri") == uri:
            for record in _merged(self._restored["unwritten"]):
                if record["step"] <= step:
                    self._segments.append(self.line(record), always=True)

    def log(self, metrics: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Append a record; records of the same step are one record."""
        if self._segments is None:
            super().log(metrics, step=step, epoch=epoch)
            return
        first = {"step": step, "epoch": epoch, "time": round(time.time(), 3), "attempt": self._attempt}
        self._segments.append(self.line(first | dict(metrics) | first))

    def rewind(self, step: int) -> None:
        """Drop the records of later steps."""
        if self._segments is None:
            super().rewind(step)
        else:
            self._segments.append(_ENCODER.encode({_REWOUND_TO: step}), always=True)

    def finish(self, status: str) -> None:
        """Write what is left, for up to 15 seconds, and close the file."""
        super().finish(status)
        if self._segments is not None:
            self._segments.close(_FINISH_TIMEOUT_S)
            self._segments = None

    def state_dict(self) -> dict[str, Any]:
        """Return the records that are not yet in the object store."""
        if self._segments is None:
            return {}
        self._segments.flush_soon()
        lines = self._segments.pending()
        return {"uri": self._uri, "unwritten": lines} if lines else {}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the records that had not been written; `start` appends them."""
        self._restored = state_dict

    def flush(self, timeout_s: float = _FINISH_TIMEOUT_S) -> bool:
        """Wait until all records are in the object store; return whether they are. On a disk they always are."""
        return self._segments is None or self._segments.flush(timeout_s)

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
    place = os.fspath(path).removeprefix("file://")
    if _is_remote(place):
        return _merged(read_segments(place))
    return [record for line in LocalLineFile(place).read() if (record := _parse(line))]


def _is_remote(place: str) -> bool:
    return "://" in place.removeprefix("file://")


def _merged(lines: Iterable[str]) -> list[Record]:
    """Return one record per step, in the order of steps, without those that were rewound."""
    records: dict[int, Record] = {}
    for line in lines:
        if (step := _rewound_to(line)) is not None:
            records = {each: record for each, record in records.items() if each <= step}
        elif record := _parse(line):
            records[record["step"]] = {**records.get(record["step"], {}), **record}
    return [records[step] for step in sorted(records)]


def _rewound_to(line: str) -> int | None:
    # Most lines are records, which need not be parsed twice.
    if not line.startswith(f'{{"{_REWOUND_TO}"'):
        return None
    try:
        return int(json.loads(line)[_REWOUND_TO])
    except (ValueError, TypeError):
        return None


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
