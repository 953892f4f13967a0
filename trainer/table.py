"""Rows of numbers as a table: lists by name, text, a data frame."""

from __future__ import annotations

import math
from typing import Any


class Table(list[dict[str, Any]]):
    """A list of rows, each a dict of numbers by name, in which a row may lack what another one has.

    Example:
        >>> history = Table([{"epoch": 1, "train/loss": 0.5}, {"epoch": 2, "train/loss": 0.25, "validation/loss": 0.3}])
        >>> history[-1]["train/loss"]
        0.25
        >>> history.columns()["validation/loss"]
        [nan, 0.3]
        >>> print(history.text())
        epoch  train/loss  validation/loss
            1         0.5
            2        0.25              0.3
    """

    def columns(self) -> dict[str, list[Any]]:
        """Returns a list for each name, as long as the table, with NaN where a row has no value."""
        names = dict.fromkeys(name for row in self for name in row)
        return {name: [row.get(name, math.nan) for row in self] for name in names}

    def text(self) -> str:
        """Returns lines for people: a header and the rows, numbers to four digits, empty where there is no value."""
        names = dict.fromkeys(name for row in self for name in row)
        cells = [list(names), *([_cell(row.get(name, "")) for name in names] for row in self)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)
        return "\n".join(line.rstrip() for line in lines)

    def dataframe(self) -> Any:
        """Returns a `pandas.DataFrame`.

        Raises:
            ImportError: pandas is not installed; Headway does not need it.
        """
        import pandas

        return pandas.DataFrame(self.columns())


def _cell(value: Any) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
