"""The Parquet files of a dataset, their row groups and row counts. Reads footers, never rows.

A *fragment* is one row group of one file, the smallest unit that can be read.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from .arrow import is_list_view
from .cache import Cache, Cached, cached_files, check_fits
from .errors import DataError
from .paths import SUFFIXES, Found, Paths, absolute, advice_for, find_all, name_files, nearest
from .row_groups import RowGroup

_FOOTER_GUESS_BYTES = 64 * 1024
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class File:
    """One Parquet file.

    Attributes:
        path: absolute path or URI.
        name: path relative to the common folder of all files; does not change when the dataset is moved.
        size_bytes: size of the file.
        digest: sha256 of the footer and of a sample from the middle of the file.
        cached: how it is read through a cache; None without one.
    """

    path: str
    name: str
    size_bytes: int
    digest: str
    cached: Cached | None = None


@dataclass(frozen=True)
class Source:
    """The fragments of a dataset, sorted by file name.

    Attributes:
        files: sorted by name.
        schema: of the selected columns.
        fragment_files: int32, index into `files` of each fragment.
        fragment_groups: int32, row group of each fragment within its file.
        fragment_rows: int64, rows of each fragment; at least 1.
        row_bytes: approximate size of a row in memory.
    """

    files: tuple[File, ...]
    schema: pa.Schema
    fragment_files: npt.NDArray[np.int32]
    fragment_groups: npt.NDArray[np.int32]
    fragment_rows: npt.NDArray[np.int64]
    row_bytes: int

    @property
    def rows(self) -> int:
        """Number of rows of all fragments."""
        return int(self.fragment_rows.sum())

    @property
    def columns(self) -> list[str]:
        """Names of the selected columns, in file order."""
        return list(self.schema.names)

    @property
    def skipped_rows(self) -> int:
        """No row of a Parquet file is left out."""
        return 0

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits that change when the data changes, but not when it is moved.

        Covers every file's name, size and footer (schema; offsets, sizes and statistics of every column chunk) and
        4 KiB from its middle. A change that keeps all of these is not detected; that would require reading everything.
        """
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.name}\0{file.size_bytes}\0{file.digest}\0".encode())
        return digest.hexdigest()[:16]

    def fragment(self, index: int) -> RowGroup:
        """Return a row group."""
        file = self.files[self.fragment_files[index]]
        return RowGroup(
            path=file.path,
            digest=file.digest,
            group=int(self.fragment_groups[index]),
            num_rows=int(self.fragment_rows[index]),
            columns=tuple(self.columns),
            cached=file.cached,
        )

    def row_name(self, index: int, row: int) -> str:
        """Return the id "<file>[<row group>]:<row in it>" of a row of a fragment."""
        return f"{self.files[self.fragment_files[index]].name}[{self.fragment_groups[index]}]:{row}"


@dataclass(frozen=True)
class Parquet:
    """Parquet files, to be read by a `Stream`, alone or as a part of a mixture.

    Args:
        path: a file, a folder (searched recursively), a glob, an fsspec URI of one of these, or a list of them.
        columns: columns to read; None for all. Files may differ in other columns.
        cache: where remote data is kept on a local disk; None reads it remotely in every epoch.

    Example:
        >>> from headway.datasets.sources import Parquet
        >>> str(Parquet("/data/train", columns=["tokens"]))
        '/data/train'
    """

    path: Paths
    columns: Sequence[str] | None = None
    cache: Cache | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", absolute(self.path))

    def open(self) -> Source:
        """Read the files' footers; see `read_source`."""
        return read_source(self.path, columns=self.columns, cache=self.cache)

    def __str__(self) -> str:
        return ", ".join(absolute(self.path))


def read_source(path: Paths, *, columns: Sequence[str] | None = None, cache: Cache | None = None) -> Source:
    """Find Parquet files and read their footers.

    Args:
        path: a file, a folder (searched recursively), a glob, an fsspec URI of one of these, or a list of them.
        columns: columns to read; None for all. Files may differ in other columns.
        cache: for the rows; the footers are always read from the files.

    Raises:
        DataError: there are no files or no rows, a file is not Parquet, a column is missing, the schemas differ, or
            the cache cannot be used.
    """
    found = find_all(path)
    cached = cached_files(cache, found)
    paths = [each.path for each in found]
    # Reading a footer is mostly latency, so many are read concurrently.
    with ThreadPoolExecutor(max_workers=min(32, len(paths))) as pool:
        footers = list(pool.map(_read_footer, found))
    names = name_files(found)
    schema = _common_schema(paths, [metadata.schema.to_arrow_schema() for metadata, _, _ in footers], columns)

    files, rows, places = [], [], []
    for index, (each, name, (metadata, size_bytes, digest)) in enumerate(zip(paths, names, footers, strict=True)):
        files.append(File(each, name, size_bytes, digest, cached[index]))
        for group in range(metadata.num_row_groups):
            if num_rows := metadata.row_group(group).num_rows:
                rows.append(num_rows)
                places.append((index, group))
    if not rows:
        raise DataError(f"{_describe(path)} holds {_count(files, 'Parquet file')} but no rows")
    where = np.array(places, dtype=np.int32)
    if cache is not None:
        check_fits(cache, _largest_read(schema, [metadata for metadata, _, _ in footers]), _describe(path))
    return Source(
        files=tuple(files),
        schema=schema,
        fragment_files=where[:, 0].copy(),
        fragment_groups=where[:, 1].copy(),
        fragment_rows=np.array(rows, dtype=np.int64),
        row_bytes=_row_bytes(schema, [metadata for metadata, _, _ in footers], sum(rows)),
    )


def _read_footer(found: Found) -> tuple[pq.FileMetaData, int, str]:
    """Return a file's metadata, size and digest, from its last bytes and a sample of its middle."""
    path = found.path
    try:
        with found.fs.open(found.inner, "rb", cache_type="none") if "://" in path else open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _FOOTER_GUESS_BYTES))
            tail = file.read()
            if size < 12 or tail[-4:] != b"PAR1":
                why = "it does not end with PAR1" if size else "it is empty; remove it"
                raise DataError(f"{path} is not a Parquet file: {why}{advice_for(path, SUFFIXES)}")
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
        raise DataError(f"{path} is not a complete Parquet file: {error}") from error
    return metadata, size, hashlib.sha256(footer + sample).hexdigest()


def _common_schema(paths: Sequence[str], schemas: Sequence[pa.Schema], columns: Sequence[str] | None) -> pa.Schema:
    selected = [_select(path, schema, columns) for path, schema in zip(paths, schemas, strict=True)]
    first = selected[0]
    kinds = {field.name: _canonical_type(field.type) for field in first}
    for path, schema in zip(paths, selected, strict=True):
        # Compared by name and by the type they are read as; column order and nullability do not matter.
        others = {field.name: _canonical_type(field.type) for field in schema}
        differing = [
            f"{name!r} is {_type_of(first, name)} in the first and {_type_of(schema, name)} in the second"
            for name in dict.fromkeys([*kinds, *others])
            if kinds.get(name) != others.get(name)
        ]
        if differing:
            raise DataError(
                f"the schemas of {paths[0]} and {path} differ: {'; '.join(differing[:3])}. Rewrite one, or select "
                "columns that they share"
            )
    return first.remove_metadata()


def _canonical_type(kind: pa.DataType) -> pa.DataType:
    """Return one type for all types that are read as the same values, e.g. string for large_string."""
    if pa.types.is_dictionary(kind):
        return _canonical_type(kind.value_type)
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or is_list_view(kind):
        return pa.list_(_canonical_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _canonical_type(field.type)) for field in kind])
    return kind


def _select(path: str, schema: pa.Schema, columns: Sequence[str] | None) -> pa.Schema:
    if twice := {name for name in schema.names if schema.names.count(name) > 1}:
        raise DataError(f"{path} has several columns called {min(twice)!r}; rename them")
    if columns is None:
        return schema
    if isinstance(columns, str) or not columns:
        raise DataError(f"columns must be a list of names, or None for all, got {columns!r}")
    for name in columns:
        if name not in schema.names and f"/{name}=" in path:
            raise DataError(
                f"{path} has no column {name!r}, only a folder of that name, and folder names do not become columns: "
                "write it into the files, or leave it out"
            )
        if name not in schema.names:
            raise DataError(f"{path} has no column {name!r}; {nearest(name, schema.names)}")
    return pa.schema([field for field in schema if field.name in columns])


def _type_of(schema: pa.Schema, name: str) -> str:
    return str(schema.field(name).type) if name in schema.names else "missing"


def _row_bytes(schema: pa.Schema, footers: Sequence[pq.FileMetaData], rows: int) -> int:
    if None not in (widths := [_width_bytes(field.type) for field in schema]):
        return max(1, sum(width for width in widths if width is not None))
    # Without a fixed width, the uncompressed size of the pages is the best estimate.
    total = sum(int(footer.row_group(g).total_byte_size) for footer in footers for g in range(footer.num_row_groups))
    return max(1, total // rows)


def _largest_read(schema: pa.Schema, footers: Sequence[pq.FileMetaData]) -> int:
    """Return the size of the largest row group, in the columns to read, or footer."""
    sizes = [footer.serialized_size for footer in footers]
    for footer in footers:
        for group in map(footer.row_group, range(footer.num_row_groups)):
            columns = map(group.column, range(group.num_columns))
            read = [each for each in columns if each.path_in_schema.partition(".")[0] in schema.names]
            sizes.append(sum(each.total_compressed_size for each in read))
    return int(max(sizes))


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
