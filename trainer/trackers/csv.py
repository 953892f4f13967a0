"""Write records as one table of comma-separated values."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from .record_file import RESERVED, Record, RecordFile


class CsvTracker(RecordFile):
    """Writes a table with one row per step, for a spreadsheet or `pandas.read_csv`.

    The columns are step, epoch, time, attempt, and one per metric in order of appearance. For a new metric the
    table is atomically replaced by one with another column; missing values are empty cells. After a resume or a rewind
    no step appears twice.

    Args:
        path: local path or fsspec URI; by default `metrics.csv` in the run directory; without either nothing is
            written. In an object store, which cannot append, the file is rewritten at each record, and training
            waits for it.

    Example:
        >>> Digits(config, run_dir="runs/table", trackers=[CsvTracker()]).fit().steps
        4
        >>> print(Path("runs/table/metrics.csv").read_text()[:10])
        step,epoch
    """

    filename = "metrics.csv"
    _columns: list[str]

    def decode(self, lines: Sequence[str]) -> list[Record]:
        """Return the rows of a table as records, without their empty cells."""
        header, *rows = list(csv.reader(lines)) or [[]]
        return [record for row in rows if (record := _parse(header, row))]

    def encode(self, records: Sequence[Record]) -> list[str]:
        """Return a header with a column for every metric in the records, and one row per record."""
        self._columns = list(dict.fromkeys((*RESERVED, *(name for record in records for name in record))))
        return [_row(self._columns), *(_row([record.get(name, "") for name in self._columns]) for record in records)]

    def line(self, record: Record) -> str | None:
        """Return a row, unless the table lacks a column for it."""
        if not record.keys() <= set(self._columns):
            return None
        return _row([record.get(name, "") for name in self._columns])


def _row(cells: Sequence[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue()


def _parse(header: Sequence[str], row: Sequence[str]) -> Record | None:
    cells = {name: cell for name, cell in zip(header, row, strict=False) if cell}
    try:
        counts = {name: int(cells.pop(name)) for name in ("step", "epoch")}
        return counts | {name: int(cell) if name == "attempt" else float(cell) for name, cell in cells.items()}
    except (KeyError, ValueError):
        return None  # The table was edited by hand.
