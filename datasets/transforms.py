"""Row-wise transforms: one row in, one row out, so that a place in an epoch stays a number of rows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .arrow import Rows
from .errors import DataError

Transform: TypeAlias = Callable[[Rows], dict[str, Any]]
"""Takes some rows as {column: array with the rows along its first axis}, returns as many, of any columns.

How many rows come at once, and which come together, is not fixed: each row's result may depend on that row only.
What is drawn at random must be drawn from the row itself, or a resumed run would draw something else.

Rows of one shape arrive as one array; others as an array of objects. What it is given is its own: it may work in place.
It may return arrays, tensors or lists. Rows of one shape become one array of numbers, rows of several an array each;
text, bytes, None and other objects stay what they are.
"""


def apply(transform: Transform, rows: Rows) -> Rows:
    """Calls one transform and checks what it returns.

    Raises:
        DataError: the transform returned something that is not as many rows.
    """
    name = name_of(transform)
    before = len(next(iter(rows.values())))
    # What was read may be a view of a file, or of what Ray shares between processes.
    given = {column: array if array.flags.writeable else array.copy() for column, array in rows.items()}
    result = transform(dict(given))
    if not isinstance(result, dict) or not result:
        raise DataError(f"the transform {name} returned {type(result).__name__}; it returns a dict of columns")
    passed_on = {id(array) for array in given.values()}
    columns: dict[str, npt.NDArray[Any]] = {}
    for column, values in result.items():
        if not isinstance(column, str):
            raise DataError(f"the transform {name} named a column {column!r}; a column's name is text")
        try:
            array = values if id(values) in passed_on else _as_array(values)
        except Exception as error:  # whatever an array of somebody else's raises
            raise DataError(
                f"the transform {name} returned a {type(values).__name__} as {column!r}, of which no rows can be made: "
                f"{type(error).__name__}: {error}"
            ) from error
        if array.ndim == 0 or len(array) != before:
            raise DataError(
                f"the transform {name} got {before} rows and returned {len(array) if array.ndim else 'no'} rows of "
                f"{column!r}; "
                "one row in, one row out keeps the place in an epoch exact. Filter and pack when the data is prepared"
            )
        if array.dtype == object and any(each is None for each in array) and any(map(_is_number, array)):
            raise DataError(
                f"the transform {name} returned None among the numbers of {column!r}, which no tensor holds; return a "
                "number for every row"
            )
        columns[column] = array
    return columns


def name_of(transform: Transform) -> str:
    """Returns what a transform is called in an error."""
    return str(getattr(transform, "__qualname__", type(transform).__qualname__))


def _as_array(values: Any) -> npt.NDArray[Any]:
    """Numbers of one shape become one array; all else an array of objects, of which ragged numbers are arrays."""
    if isinstance(values, np.ndarray) and values.dtype != object:
        return values.astype(object) if values.dtype.kind in "US" else values
    if not isinstance(values, (list, tuple, np.ndarray)):
        return _as_array(np.asarray(values))
    if len(values) and _is_number(values[0]):  # as a rule they all are, and NumPy finds out sooner
        with suppress(ValueError):
            numbers = np.asarray(values)
            if numbers.dtype.kind not in "USO":
                return numbers
    rows = [_as_row(each) for each in values]
    if all(_is_number(each) or _is_array(each) or _is_empty(each) or each is None for each in rows):
        # A list without an item does not say what it is empty of: of what the other lists are.
        kinds = {each.dtype for each in rows if _is_array(each) and each.dtype != object}
        kind = np.result_type(*kinds) if kinds else np.dtype(np.float64)
        rows = [np.empty(0, kind) if _is_empty(each) else each for each in rows]
        if not any(each is None or (_is_array(each) and each.dtype == object) for each in rows):
            with suppress(ValueError):  # rows of different shapes
                return np.asarray(rows)
    # Not text: NumPy's is for each row as wide as the widest, and its bytes lose the zeros at their end.
    objects = np.empty(len(rows), dtype=object)
    for index, row in enumerate(rows):
        objects[index] = row
    return objects


def _as_row(value: Any) -> Any:
    if isinstance(value, (list, tuple)) and value:
        array = _as_array(value)
        return array if array.dtype != object or all(map(_is_array, array)) else value
    if hasattr(value, "__array__") and not isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value)  # a tensor
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.generic)) and not isinstance(value, (str, bytes))


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind not in "US"


def _is_empty(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and not value
