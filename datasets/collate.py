"""Arrow columns to arrays of rows and back, and rows of several arrays to the tensors of one batch.

A column of numbers becomes an array [B]; of lists that are all of one length, [B, T] (deeper nesting likewise).
All else (text, bytes, ragged lists, dates) stays a Python object for each row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from .errors import DataError

Rows: TypeAlias = dict[str, npt.NDArray[Any]]


def to_rows(table: pa.Table) -> Rows:
    """Returns a table's columns as arrays, without copying numbers that lie together.

    Raises:
        DataError: a column of numbers has nulls, which no tensor can hold.
    """
    return {name: _to_array(name, _in_one_piece(table.column(name))) for name in table.column_names}


def to_table(rows: Mapping[str, npt.NDArray[Any]]) -> pa.Table:
    """The reverse of `to_rows`: what crosses from one process to another."""
    return pa.table({name: _to_arrow(np.asarray(column)) for name, column in rows.items()})


def num_rows(rows: Mapping[str, Any]) -> int:
    """Returns the length of the first column."""
    return len(next(iter(rows.values())))


def _in_one_piece(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _to_array(name: str, column: pa.Array) -> npt.NDArray[Any]:
    if isinstance(column, pa.ChunkedArray):  # what `combine_chunks` returns differs between versions of Arrow
        column = pa.concat_arrays(column.chunks)
    if isinstance(column.type, pa.BaseExtensionType):
        shape = list(getattr(column.type, "shape", ()))
        flat = _to_array(name, column.storage)
        return flat.reshape(len(column), *shape) if shape else flat
    if pa.types.is_dictionary(column.type):
        return _to_array(name, column.dictionary_decode())
    if pa.types.is_fixed_size_list(column.type) and not column.null_count and _is_numeric(column.type.value_type):
        return _to_array(name, column.flatten()).reshape(
            len(column), column.type.list_size, *_inner(column.flatten().type)
        )
    if (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)) and _is_numeric(column.type.value_type):
        return _lists(name, column)
    if pa.types.is_boolean(column.type) or pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        if column.null_count:
            raise DataError(
                f"column {name!r} has {column.null_count} nulls among {len(column)} values, which no tensor holds; "
                "fill them or leave these rows out when the data is prepared"
            )
        array: npt.NDArray[Any] = column.to_numpy(zero_copy_only=False)
        return array
    objects = np.empty(len(column), dtype=object)
    objects[:] = column.to_pylist()
    return objects


def _lists(name: str, column: pa.Array) -> npt.NDArray[Any]:
    offsets = column.offsets.to_numpy()
    lengths = np.diff(offsets)
    if not column.null_count and len(lengths) and (lengths == lengths[0]).all() and lengths[0]:
        values = _to_array(name, column.values[int(offsets[0]) : int(offsets[-1])])
        return values.reshape(len(column), int(lengths[0]), *values.shape[1:])
    ragged = np.empty(len(column), dtype=object)
    for index, each in enumerate(column):
        ragged[index] = None if not each.is_valid else _to_array(name, each.values)
    return ragged


def _is_numeric(kind: pa.DataType) -> bool:
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _is_numeric(kind.value_type)
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _inner(kind: pa.DataType) -> tuple[int, ...]:
    return (int(kind.list_size), *_inner(kind.value_type)) if pa.types.is_fixed_size_list(kind) else ()


def _to_arrow(column: npt.NDArray[Any]) -> pa.Array:
    if column.dtype == object:
        return _objects_to_arrow(list(column))
    if column.ndim < 2:
        return pa.array(column)
    flat = pa.array(np.ascontiguousarray(column).reshape(-1))
    for length in reversed(column.shape[1:]):
        flat = pa.FixedSizeListArray.from_arrays(flat, length)
    return flat


def _objects_to_arrow(objects: list[Any]) -> pa.Array:
    """Arrays of any lengths and depth become lists of what is in them, of its own dtype; None becomes null."""
    lists = [each for each in objects if each is not None]
    if not lists or not all(isinstance(each, np.ndarray) and each.ndim for each in lists):
        return pa.array(objects)
    # The empty ones do not know what they are empty of.
    full = [each for each in lists if len(each)] or lists[:1]
    if any(each.ndim > 1 or each.dtype == object for each in full):
        values = _objects_to_arrow([item for each in full for item in each])
    else:
        values = pa.array(np.concatenate(full))
    ends = np.cumsum([0 if each is None else len(each) for each in objects])
    is_null = np.array([each is None for each in objects] + [False])
    return pa.ListArray.from_arrays(pa.array(np.concatenate(([0], ends)), pa.int32(), mask=is_null), values)


def same_kind(parts: Sequence[npt.NDArray[Any]]) -> bool:
    """Whether these pieces of one column can be laid into one array of numbers."""
    first = parts[0]
    return first.dtype.kind in "biuf" and all(
        each.dtype == first.dtype and each.shape[1:] == first.shape[1:] for each in parts
    )
