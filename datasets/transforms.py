"""Row-wise transforms: one row in, one row out, so that a position in an epoch stays a number of rows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .arrow import Rows
from .errors import DataError

Transform: TypeAlias = Callable[[Rows], dict[str, Any]]
"""Maps some rows, {column: array with rows along axis 0}, to the same number of rows with any columns.

How many and which rows come together is not fixed, so each row's result must depend on that row only. Seed random
numbers from the row itself; otherwise a resumed run would draw others.

Rows of one shape arrive as one array, other rows as an object array. The arrays are copies and may be changed in place.
Return arrays, tensors or lists. Rows of one shape become one numeric array, rows of different shapes one array each;
text, bytes, None and other objects are kept.
"""


def apply(transform: Transform, rows: Rows) -> Rows:
    """Call one transform and check its result.

    Raises:
        DataError: the transform did not return the same number of rows.
    """
    name = name_of(transform)
    before = len(next(iter(rows.values())))
    # The arrays may be views of a mapped file or of Ray's shared memory, which must not be written to.
    given = {column: array if array.flags.writeable else array.copy() for column, array in rows.items()}
    result = transform(dict(given))
    if not isinstance(result, dict) or not result:
        raise DataError(f"the transform {name} returned {type(result).__name__}; it must return a dict of columns")
    passed_on = {id(array) for array in given.values()}
    columns: dict[str, npt.NDArray[Any]] = {}
    for column, values in result.items():
        if not isinstance(column, str):
            raise DataError(f"the transform {name} returned the column name {column!r}; column names must be str")
        try:
            array = values if id(values) in passed_on else _as_array(values)
        except Exception as error:  # any error of a foreign array type
            raise DataError(
                f"the transform {name} returned a {type(values).__name__} as {column!r}, which is not convertible to "
                f"rows: {type(error).__name__}: {error}"
            ) from error
        if array.ndim == 0 or len(array) != before:
            raise DataError(
                f"the transform {name} got {before} rows and returned {len(array) if array.ndim else 'no'} rows of "
                f"{column!r}; "
                "one row in, one row out keeps the position in an epoch exact. Filter and pack in the prepared data"
            )
        if array.dtype == object and any(each is None for each in array) and any(map(_is_number, array)):
            raise DataError(
                f"the transform {name} returned None among the numbers of {column!r}; tensors cannot hold it. "
                "Return a number for every row"
            )
        columns[column] = array
    return columns


def name_of(transform: Transform) -> str:
    """Return the name of a transform, for errors."""
    return str(getattr(transform, "__qualname__", type(transform).__qualname__))


def _as_array(values: Any) -> npt.NDArray[Any]:
    """Return numbers of one shape as one array, anything else as an object array (ragged numbers as arrays in it)."""
    if isinstance(values, np.ndarray) and values.dtype != object:
        return values.astype(object) if values.dtype.kind in "US" else values
    if not isinstance(values, (list, tuple, np.ndarray)):
        return _as_array(np.asarray(values))
    if len(values) and _is_number(values[0]):  # fast path: usually all are numbers
        with suppress(ValueError):
            numbers = np.asarray(values)
            if numbers.dtype.kind not in "USO":
                return numbers
    rows = [_as_row(each) for each in values]
    if all(_is_number(each) or _is_array(each) or _is_empty(each) or each is None for each in rows):
        # An empty list has no dtype: it gets that of the other lists.
        kinds = {each.dtype for each in rows if _is_array(each) and each.dtype != object}
        kind = np.result_type(*kinds) if kinds else np.dtype(np.float64)
        rows = [np.empty(0, kind) if _is_empty(each) else each for each in rows]
        if not any(each is None or (_is_array(each) and each.dtype == object) for each in rows):
            with suppress(ValueError):  # rows of different shapes
                return np.asarray(rows)
    # Text stays objects: NumPy pads str to the widest row, and strips trailing zeros from bytes.
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
