"""What a dataset is made of: Parquet files, their row groups, how many rows each has. Reads footers, never rows.

A *fragment* is one row group of one file: the smallest thing that can be read alone.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from .errors import DataError
from .paths import Found, Paths, absolute, find, name_files, nearest

_FOOTER_GUESS_BYTES = 64 * 1024
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class File:
    """One Parquet file.

    Attributes:
        path: absolute path or URI.
        name: path relative to what all files of the source have in common; stays the same when a dataset is moved.
        size_bytes: of the file.
        digest: sha256 of the footer and of a sample from the middle of the file.
    """

    path: str
    name: str
    size_bytes: int
    digest: str


@dataclass(frozen=True)
class Source:
    """The fragments of a dataset, in the order of their files' names.

    Attributes:
        files: sorted by name.
        schema: of the selected columns.
        fragment_files: int32, index into `files` of each fragment.
        fragment_groups: int32, row group of each fragment within its file.
        fragment_rows: int64, rows of each fragment; none is empty.
        row_bytes: what a row takes in memory, roughly.
    """

    files: tuple[File, ...]
    schema: pa.Schema
    fragment_files: npt.NDArray[np.int32]
    fragment_groups: npt.NDArray[np.int32]
    fragment_rows: npt.NDArray[np.int64]
    row_bytes: int

    @property
    def rows(self) -> int:
        """Rows of all fragments."""
        return int(self.fragment_rows.sum())

    @property
    def columns(self) -> list[str]:
        """Names of the selected columns, in the order of the files."""
        return list(self.schema.names)

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits that change when the data changes, and do not when it is only moved.

        It covers every file's name, size and footer (schema; offsets, sizes and statistics of every column chunk) and
        4 KiB from its middle. A change that leaves all of these as they are goes unnoticed: noticing it would take
        reading everything.
        """
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.name}\0{file.size_bytes}\0{file.digest}\0".encode())
        return digest.hexdigest()[:16]


def read_source(path: Paths, *, columns: Sequence[str] | None = None) -> Source:
    """Finds Parquet files and reads their footers.

    Args:
        path: a file, a folder (searched to its bottom), a glob, an fsspec URI of one of these, or a list of them.
        columns: those that will be read; None for all. Files may differ in the others.

    Raises:
        DataError: nothing is there, it holds no rows or is not Parquet, a column is missing, or the
            files' schemas differ.
    """
    if not (wanted := absolute(path)):
        raise DataError("no path was given, but an empty list: what made it found nothing")
    found = sorted((each for one in wanted for each in find(one)), key=lambda each: each.path)
    paths = [each.path for each in found]
    if twice := [one for one, other in pairwise(paths) if one == other]:
        raise DataError(f"{twice[0]} is in the dataset twice, and its rows would be too; name it once")
    # Footers are small and far away: waiting for many at once costs no more than waiting for one.
    with ThreadPoolExecutor(max_workers=min(32, len(paths))) as pool:
        footers = list(pool.map(_read_footer, found))
    names = name_files(found)
    schema = _common_schema(paths, [metadata.schema.to_arrow_schema() for metadata, _, _ in footers], columns)

    files, rows, places = [], [], []
    for index, (each, name, (metadata, size_bytes, digest)) in enumerate(zip(paths, names, footers, strict=True)):
        files.append(File(each, name, size_bytes, digest))
        for group in range(metadata.num_row_groups):
            if num_rows := metadata.row_group(group).num_rows:
                rows.append(num_rows)
                places.append((index, group))
    if not rows:
        raise DataError(f"{_describe(path)} holds {_count(files, 'Parquet file')} and not one row")
    where = np.array(places, dtype=np.int32)
    return Source(
        files=tuple(files),
        schema=schema,
        fragment_files=where[:, 0].copy(),
        fragment_groups=where[:, 1].copy(),
        fragment_rows=np.array(rows, dtype=np.int64),
        row_bytes=_row_bytes(schema, [metadata for metadata, _, _ in footers], sum(rows)),
    )


def _read_footer(found: Found) -> tuple[pq.FileMetaData, int, str]:
    """Returns a file's metadata, size and digest from its last bytes and a sample of its middle."""
    path = found.path
    try:
        with found.fs.open(found.inner, "rb", cache_type="none") if "://" in path else open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _FOOTER_GUESS_BYTES))
            tail = file.read()
            if size < 12 or tail[-4:] != b"PAR1":
                raise DataError(f"{path} is not a Parquet file: it does not end in PAR1")
            length = int.from_bytes(tail[-8:-4], "little") + 8
            if length > min(len(tail), size):
                file.seek(max(0, size - length))
                tail = file.read()
            file.seek(max(0, size // 2 - _SAMPLE_BYTES // 2))
            sample = file.read(_SAMPLE_BYTES)
    except OSError as error:
        raise DataError(f"cannot read {path}: {type(error).__name__}: {error}") from error
    footer = tail[-length:]
    try:
        metadata = pq.read_metadata(pa.BufferReader(footer))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a whole Parquet file: {error}") from error
    return metadata, size, hashlib.sha256(footer + sample).hexdigest()


def _common_schema(paths: Sequence[str], schemas: Sequence[pa.Schema], columns: Sequence[str] | None) -> pa.Schema:
    selected = [_select(path, schema, columns) for path, schema in zip(paths, schemas, strict=True)]
    first = selected[0]
    kinds = {field.name: _canonical_type(field.type) for field in first}
    for path, schema in zip(paths, selected, strict=True):
        # By name, as they are read: in which order a file has them, and whether it says that none is null, is all one.
        others = {field.name: _canonical_type(field.type) for field in schema}
        differing = [
            f"{name!r} is {_type_of(first, name)} in the first and {_type_of(schema, name)} in the second"
            for name in dict.fromkeys([*kinds, *others])
            if kinds.get(name) != others.get(name)
        ]
        if differing:
            raise DataError(
                f"the schemas of {paths[0]} and {path} differ: {'; '.join(differing[:3])}. Rewrite one, or read only "
                "columns that they share"
            )
    return first.remove_metadata()


def _canonical_type(kind: pa.DataType) -> pa.DataType:
    """Returns one type for all that are read as the same values: text and bytes of either width, dictionaries of it."""
    if pa.types.is_dictionary(kind):
        return _canonical_type(kind.value_type)
    if pa.types.is_large_string(kind):
        return pa.string()
    if pa.types.is_large_binary(kind):
        return pa.binary()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_canonical_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _canonical_type(field.type)) for field in kind])
    return kind


def _select(path: str, schema: pa.Schema, columns: Sequence[str] | None) -> pa.Schema:
    if twice := {name for name in schema.names if schema.names.count(name) > 1}:
        raise DataError(f"{path} has several columns called {min(twice)!r}; give each a name of its own")
    if columns is None:
        return schema
    if isinstance(columns, str) or not columns:
        raise DataError(f"columns is a list of names or None for all, not {columns!r}")
    for name in columns:
        if name not in schema.names:
            raise DataError(f"{path} has no column {name!r}; {nearest(name, schema.names)}")
    return pa.schema([field for field in schema if field.name in columns])


def _type_of(schema: pa.Schema, name: str) -> str:
    return str(schema.field(name).type) if name in schema.names else "missing"


def _row_bytes(schema: pa.Schema, footers: Sequence[pq.FileMetaData], rows: int) -> int:
    if None not in (widths := [_width_bytes(field.type) for field in schema]):
        return max(1, sum(width for width in widths if width is not None))
    # Without a fixed width, what the pages take uncompressed is the best guess there is.
    total = sum(int(footer.row_group(g).total_byte_size) for footer in footers for g in range(footer.num_row_groups))
    return max(1, total // rows)


def _width_bytes(kind: pa.DataType) -> int | None:
    if isinstance(kind, pa.BaseExtensionType):
        return _width_bytes(kind.storage_type)
    if pa.types.is_fixed_size_list(kind):
        inner = _width_bytes(kind.value_type)
        return None if inner is None else int(kind.list_size) * inner
    if pa.types.is_boolean(kind):
        return 1
    if pa.types.is_primitive(kind) or pa.types.is_fixed_size_binary(kind):
        return int(kind.bit_width) // 8
    return None


def _describe(path: Paths) -> str:
    return ", ".join(absolute(path)[:3])


def _count(things: Sequence[object], name: str) -> str:
    return f"{len(things)} {name}{'s' if len(things) != 1 else ''}"
