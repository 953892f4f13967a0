"""Row-wise transforms: one row in, one row out, so that a place in an epoch stays a number of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .collate import Rows
from .errors import DataError

Transform: TypeAlias = Callable[[Rows], dict[str, Any]]
"""Takes some rows as {column: array with the rows along its first axis}, returns as many, of any columns.

How many rows come at once, and which come together, is not fixed: each row's result may depend on that row only.
What is drawn at random must be drawn from the row itself, or a resumed run would draw something else.
"""


def apply(transform: Transform, rows: Rows) -> Rows:
    """Calls one transform and checks what it returns.

    Raises:
        DataError: the transform returned something that is not as many rows.
    """
    name = getattr(transform, "__qualname__", type(transform).__qualname__)
    before = len(next(iter(rows.values())))
    result = transform(dict(rows))
    if not isinstance(result, dict) or not result:
        raise DataError(f"the transform {name} returned {type(result).__name__}; it returns a dict of columns")
    columns: dict[str, npt.NDArray[Any]] = {}
    for column, values in result.items():
        array = _as_array(values)
        if array.ndim == 0 or len(array) != before:
            raise DataError(
                f"the transform {name} got {before} rows and returned {len(array) if array.ndim else 'no'} rows of "
                f"{column!r}; "
                "one row in, one row out keeps the place in an epoch exact. Filter and pack when the data is prepared"
            )
        columns[column] = array
    return columns


def _as_array(values: Any) -> npt.NDArray[Any]:
    try:
        return np.asarray(values)
    except ValueError:  # rows of different shapes
        ragged = np.empty(len(values), dtype=object)
        ragged[:] = values
        return ragged
