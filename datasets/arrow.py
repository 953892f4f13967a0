"""Converts Arrow tables to NumPy arrays of rows, and back.

A numeric column becomes an array [B]; lists that all have one length become [B, T], and so on for deeper nesting. Any
other column becomes an object array with one Python object per row: str, bytes, dates, dicts; an array for ragged lists
of numbers; an array of arrays for lists that are ragged inside. Columns of `shaped_bytes` become uint8 arrays [B, ...].
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from .errors import DataError

Rows: TypeAlias = dict[str, npt.NDArray[Any]]

NUMBERS = "biuf"
"""NumPy dtype kinds that a tensor can hold."""

_SHAPE = b"headway.shape"
# The type of a pickled object on its way to another process.
_PICKLE = pa.struct([("headway: pickle", pa.large_binary())])


def to_rows(table: pa.Table) -> Rows:
    """Return the columns of a table from a file as arrays; contiguous numbers are not copied.

    Raises:
        DataError: a numeric column has nulls, which tensors cannot hold.
    """
    columns = zip(table.schema, table.columns, strict=True)
    return {
        field.name: _shaped(field, _in_one_piece(column))
        if shape_of(field) is not None
        else _to_array(field.name, _in_one_piece(column))
        for field, column in columns
    }


def shaped_bytes(name: str, arrays: npt.NDArray[np.uint8]) -> tuple[pa.Field, pa.Array]:
    """Return the column of a file that holds the bytes of one array per row, and their shape in its metadata.

    Parquet has no integers of one byte: it reads a list of them value by value, about 15 times slower.

    Args:
        name: of the column.
        arrays: uint8 [B, ...].
    """
    shape = list(arrays.shape[1:])
    kind = pa.binary(math.prod(shape))
    data = pa.py_buffer(np.ascontiguousarray(arrays))
    field = pa.field(name, kind, nullable=False, metadata={_SHAPE: json.dumps(shape)})
    return field, pa.FixedSizeBinaryArray.from_buffers(kind, len(arrays), [None, data])


def shape_of(field: pa.Field) -> list[int] | None:
    """Return the shape of the arrays in a column of `shaped_bytes`; None for any other column."""
    written = (field.metadata or {}).get(_SHAPE)
    return None if written is None else json.loads(written)


def _shaped(field: pa.Field, column: pa.Array) -> npt.NDArray[np.uint8]:
    """Invert `shaped_bytes`, without a copy."""
    shape = shape_of(field) or []
    size = field.type.byte_width if pa.types.is_fixed_size_binary(field.type) else -1
    if column.null_count or math.prod(shape) != size:
        raise DataError(f"column {field.name!r} has nulls, or is no bytes of the shape {shape}: it is {field.type}")
    if isinstance(column, pa.ChunkedArray):  # what `combine_chunks` returns differs between versions of Arrow
        column = pa.concat_arrays(column.chunks)
    _, data = column.buffers()
    array = np.frombuffer(data, np.uint8, len(column) * size, column.offset * size)
    return array.reshape(len(column), *shape)


def from_table(table: pa.Table) -> Rows:
    """Invert `to_table`. Only for tables made by it, because unpickling the contents of a file could run its code."""
    columns = {name: _in_one_piece(table.column(name)) for name in table.column_names}
    return {
        name: _unpickled(column) if column.type == _PICKLE else _to_array(name, column)
        for name, column in columns.items()
    }


def to_table(rows: Mapping[str, npt.NDArray[Any]]) -> pa.Table:
    """Return rows as a table that can be sent to another process; numbers are not copied.

    Raises:
        DataError: a column holds objects that cannot be pickled.
    """
    return concat([rows])


def concat(pieces: Sequence[Mapping[str, npt.NDArray[Any]]]) -> pa.Table:
    """Return the rows of several pieces as one table with one chunk per piece.

    Raises:
        DataError: the pieces have different columns, or one holds objects that cannot be pickled.
    """
    first = pieces[0]
    for piece in pieces:
        if piece.keys() != first.keys():
            raise DataError(
                f"some rows have the columns {list(first)} and others {list(piece)}; a transform must return the same "
                "columns for all rows"
            )
    return pa.table({name: _to_arrow(name, [piece[name] for piece in pieces]) for name in first})


def num_rows(rows: Mapping[str, Any]) -> int:
    """Return the number of rows."""
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
    if is_list_view(column.type):
        return _to_array(name, column.cast(pa.large_list(column.type.value_type)))
    if pa.types.is_fixed_size_list(column.type) and not column.null_count and _is_numeric(column.type.value_type):
        return _to_array(name, column.flatten()).reshape(
            len(column), column.type.list_size, *_inner(column.flatten().type)
        )
    if _is_list(column.type) and _is_numeric(column.type.value_type):
        return _lists(name, column)
    if pa.types.is_boolean(column.type) or pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        if column.null_count:
            raise DataError(
                f"column {name!r} has {column.null_count} nulls among {len(column)} values; tensors cannot hold them. "
                "Fill them, or remove these rows when you prepare the data"
            )
        array: npt.NDArray[Any] = column.to_numpy(zero_copy_only=False)
        return array
    try:
        return to_objects(column.to_pylist())
    except (OverflowError, ValueError) as error:
        raise DataError(
            f"column {name!r} ({column.type}) has values that Python has no objects for: {error}. Convert it when you "
            "prepare the data, or leave it out with columns=[...]"
        ) from error


def _unpickled(column: pa.Array) -> npt.NDArray[Any]:
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    return to_objects([pickle.loads(each) for chunk in chunks for each in chunk.field(0).to_pylist()])


def to_objects(values: Sequence[Any]) -> npt.NDArray[Any]:
    """Return an object array of these values."""
    objects = np.empty(len(values), dtype=object)
    for index, each in enumerate(values):  # one by one: NumPy would merge arrays of one shape into one array
        objects[index] = each
    return objects


def _lists(name: str, column: pa.Array) -> npt.NDArray[Any]:
    if not column.null_count and not pa.types.is_fixed_size_list(column.type):
        offsets = column.offsets.to_numpy()
        lengths = np.diff(offsets)
        length = int(lengths[0]) if len(lengths) else 0
        if (lengths == length).all():
            values = _to_array(name, column.values[int(offsets[0]) : int(offsets[-1])])
            if values.dtype != object:
                # Without rows, the length of the lists is unknown: return the empty array with the file's dtype.
                return values.reshape(len(column), length, *values.shape[1:]) if len(column) else values
    return to_objects([_to_array(name, each.values) if each.is_valid else None for each in column])


def is_list_view(kind: pa.DataType) -> bool:
    """Return whether values of this Arrow type are lists that need not be in the order of their rows."""
    return bool(pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_numeric(kind: pa.DataType) -> bool:
    if _is_list(kind) or is_list_view(kind):
        return _is_numeric(kind.value_type)
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _inner(kind: pa.DataType) -> tuple[int, ...]:
    return (int(kind.list_size), *_inner(kind.value_type)) if pa.types.is_fixed_size_list(kind) else ()


def _to_arrow(name: str, columns: Sequence[npt.NDArray[Any]]) -> pa.ChunkedArray:
    """Return the columns as chunks of one type. Row groups may differ: lists of one length here, ragged ones there."""
    try:
        for form in (_as_numbers, _as_lists, _as_pickles):
            chunks = [form(column) for column in columns]
            if len({None if chunk is None else chunk.type for chunk in chunks}) == 1 and chunks[0] is not None:
                break
    except Exception as error:  # pickling runs user code
        kinds = ", ".join(sorted({type(each).__name__ for column in columns for each in column}))
        raise DataError(
            f"column {name!r} holds {kinds}, which cannot be sent to another process: {type(error).__name__}: {error}. "
            "Return numbers, arrays, text or plain Python objects"
        ) from error
    return pa.chunked_array(chunks)


def _as_numbers(column: npt.NDArray[Any]) -> pa.Array | None:
    # Arrow has no fixed-size lists of length 0.
    if column.dtype.kind not in NUMBERS + "mM" or 0 in column.shape[1:]:
        return None
    if column.ndim < 2:
        return pa.array(column)
    flat = pa.array(np.ascontiguousarray(column).reshape(-1))
    for length in reversed(column.shape[1:]):
        flat = pa.FixedSizeListArray.from_arrays(flat, length)
    return flat


def _as_lists(column: npt.NDArray[Any]) -> pa.Array | None:
    kinds = {(each.dtype.kind, each.dtype, each.ndim) if isinstance(each, np.ndarray) else None for each in column}
    if len(kinds) > 1 or (kind := kinds.pop()) is None or kind[0] not in NUMBERS or kind[2] != 1:
        return None
    ends = np.cumsum([0, *map(len, column)])
    return pa.LargeListArray.from_arrays(pa.array(ends), pa.array(np.concatenate(list(column))))


def _as_pickles(column: npt.NDArray[Any]) -> pa.Array:
    """Pickle each object. The type that Arrow infers from some rows may differ from that of others and of the file."""
    rows = pa.array(column).to_pylist() if column.dtype.kind in "mM" else column
    pickles = pa.array([pickle.dumps(each, protocol=5) for each in rows], pa.large_binary())
    return pa.StructArray.from_arrays([pickles], fields=list(_PICKLE))


def is_stackable(parts: Sequence[npt.NDArray[Any]]) -> bool:
    """Return whether these pieces of one column fit into one numeric array."""
    first = parts[0]
    return first.dtype.kind in NUMBERS and all(
        each.dtype == first.dtype and each.shape[1:] == first.shape[1:] for each in parts
    )
