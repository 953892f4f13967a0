"""Describes a dataset, and looks up single rows (`headway data show`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from .arrow import Rows, shape_of, to_rows
from .errors import DataError
from .formats import images, jsonl, webdataset
from .formats.base import RowSource
from .formats.images import Images
from .formats.jsonl import JsonLines
from .formats.webdataset import WebDataset
from .paths import SUFFIXES, PathLike, Paths, absolute, find_all, nearest
from .row_groups import read_group
from .sources import Parquet, Source

# Fragments that are read for statistics, at most.
_SAMPLE_FRAGMENTS = 8
_INDEXED = (*jsonl.SUFFIXES, *webdataset.SUFFIXES, *images.SUFFIXES)


@dataclass(frozen=True)
class Description:
    """Summary of a dataset.

    Attributes:
        path: the path given.
        rows, files, fragments: number of rows, files and fragments, which for Parquet are row groups.
        size_bytes: total size of the files.
        columns: {name: type}.
        fingerprint: changes when the data changes.
        first_row: {column: value} of the first row.
        unit: what a fragment is.
        lengths: {column: (least, median, greatest)} of the characters of texts, or of the items of lists, that differ.
        sampled_rows: rows whose lengths were measured, in fragments from all over the data.
        damaged: why fragments of this sample could not be read.
    """

    path: str
    rows: int
    files: int
    fragments: int
    size_bytes: int
    columns: dict[str, str]
    fingerprint: str
    first_row: dict[str, Any]
    unit: str = "row groups"
    lengths: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    sampled_rows: int = 0
    damaged: tuple[str, ...] = ()

    def __str__(self) -> str:
        width = max(len(name) for name in self.columns)
        lines = [
            f"{self.path}",
            f"  rows         {self.rows:,}",
            f"  {self.unit:<12} {self.fragments:,}",
            f"  files        {self.files:,}",
            f"  size         {_bytes(self.size_bytes)}",
            f"  fingerprint  {self.fingerprint}",
            "  columns and the first row",
        ]
        kind = max(len(each) for each in self.columns.values())
        for name, each in self.columns.items():
            lines.append(f"    {name:<{width}}  {each:<{kind}}  {_short(self.first_row[name])}")
        if self.lengths:
            lines.append(f"  lengths in {self.sampled_rows:,} rows (least, median, greatest)")
            lines += [
                f"    {name:<{width}}  {', '.join(f'{each:,}' for each in some)}" for name, some in self.lengths.items()
            ]
        return "\n".join([*lines, *(f"  damaged: {each}" for each in self.damaged)])


def describe(path: Paths, *, columns: Sequence[str] | None = None, index: PathLike | None = None) -> Description:
    """Summarize a dataset of any format that has files, from its footers or its index, and its first row.

    Args:
        path: Parquet, JSON Lines or WebDataset files, or a folder of images.
        columns: columns to read; None for all.
        index: folder for the index of a format that needs one; None puts it beside the data.

    Raises:
        DataError: the dataset is missing or damaged.
    """
    data = _format_of(path, columns=columns, index=index)
    source = data.open()
    if isinstance(source, Source):
        kinds = {field.name: _kind_of(field) for field in source.schema}
        first, sizes = _row(source, 0, 0), [file.size_bytes for file in source.files]
    else:
        rows = source.fragment(0).read()
        kinds = {name: _type_of(column) for name, column in rows.items()}
        first = _first(rows)
        found = find_all(path, suffixes=_INDEXED)
        sizes = [int(each.fs.size(each.inner)) for each in found]
    lengths, sampled_rows, damaged = ({}, 0, ()) if isinstance(data, Images) else _lengths(source)
    return Description(
        path=str(data),
        rows=source.rows,
        files=len(sizes),
        fragments=len(source.fragment_rows),
        size_bytes=sum(sizes),
        columns=kinds,
        fingerprint=source.fingerprint,
        first_row=first,
        unit="row groups" if isinstance(source, Source) else "fragments",
        lengths=lengths,
        sampled_rows=sampled_rows,
        damaged=damaged,
    )


def _lengths(source: RowSource) -> tuple[dict[str, tuple[int, int, int]], int, tuple[str, ...]]:
    """Return the lengths of texts and lists in a sample of fragments, its number of rows, and what is damaged in it."""
    count = len(source.fragment_rows)
    found: dict[str, list[npt.NDArray[np.int64]]] = {}
    rows, damaged = 0, []
    for index in sorted({each * count // _SAMPLE_FRAGMENTS for each in range(_SAMPLE_FRAGMENTS)}):
        try:
            measured = _lengths_in(source, index)
        except DataError as error:
            damaged.append(str(error))
            continue
        rows += int(source.fragment_rows[index])
        for name, lengths in measured.items():
            found.setdefault(name, []).append(lengths)
    columns = {name: np.concatenate(each) for name, each in found.items()}
    shown = {
        name: (int(each.min()), int(np.median(each)), int(each.max()))
        for name, each in columns.items()
        if len(each) and each.min() < each.max()
    }
    return shown, rows, tuple(damaged)


def _lengths_in(source: RowSource, index: int) -> dict[str, npt.NDArray[np.int64]]:
    """Return the lengths in each column with texts or lists of a fragment, without nulls."""
    if not isinstance(source, Source):
        return {
            name: np.array([len(each) for each in values if isinstance(each, str | np.ndarray)], np.int64)
            for name, values in source.fragment(index).read().items()
        }
    measures = _measures(source.schema)
    if not measures:
        return {}
    table = read_group(source.fragment(index)._replace(columns=tuple(measures)))
    return {
        name: lengths_of(table.column(name)).drop_null().to_numpy().astype(np.int64)
        for name, lengths_of in measures.items()
    }


def _measures(schema: pa.Schema) -> dict[str, Callable[[Any], Any]]:
    """Return the function that measures each column with texts or lists of any length."""
    found: dict[str, Callable[[Any], Any]] = {}
    for each in schema:
        if pa.types.is_string(each.type) or pa.types.is_large_string(each.type):
            found[each.name] = pc.utf8_length
        elif pa.types.is_list(each.type) or pa.types.is_large_list(each.type):
            found[each.name] = pc.list_value_length
    return found


def _format_of(
    path: Paths, *, columns: Sequence[str] | None = None, index: PathLike | None = None
) -> Parquet | JsonLines | WebDataset | Images:
    """Return the dataset at a path, by the endings of its files: the first format that has any; else Parquet."""
    if _has(path, SUFFIXES):
        return Parquet(path, columns)
    if _has(path, jsonl.SUFFIXES):
        return JsonLines(path, columns, index=index)
    if _has(path, webdataset.SUFFIXES):
        return WebDataset(path, columns, index=index)
    if _has(path, images.SUFFIXES):
        return Images(absolute(path)[0], index=index)
    return Parquet(path, columns)


def _has(path: Paths, suffixes: tuple[str, ...]) -> bool:
    try:
        return find_all(path, suffixes=suffixes)[0].path.lower().endswith(suffixes)
    except DataError:
        return False


def read_row(
    path: Paths, row: str, *, columns: Sequence[str] | None = None, index: PathLike | None = None
) -> dict[str, Any]:
    """Return a row by its id, as shown in errors and in a checkpoint's resume check, or returned by `row_ids()`.

    Args:
        path: the whole dataset; file names in ids are relative to the common folder of all files.
        row: the id: for Parquet "<file>[<row group>]:<row in it>", counted from 0. In other formats, the time to find
            it is proportional to the rows.
        columns: columns to return; None for all. Files may differ in other columns.
        index: see `describe`.

    Returns:
        {column: value}.

    Raises:
        DataError: there is no such row.
    """
    source = _format_of(path, columns=columns, index=index).open()
    if isinstance(source, Source):
        return _parquet_row(source, row)
    for fragment, rows in enumerate(source.fragment_rows.tolist()):
        for number in range(rows):
            if source.row_name(fragment, number) == row:
                return _first(source.fragment(fragment).read(), number)
    raise DataError(f'the dataset has no row {row!r}; the id of its first row is "{source.row_name(0, 0)}"')


def _parquet_row(source: Source, row: str) -> dict[str, Any]:
    names = [file.name for file in source.files]
    written = re.fullmatch(r"(.+)\[(\d+)\]:(\d+)", row)
    if written is None:
        raise DataError(f'a row id looks like "{names[0]}[0]:17" (file[row group]:row), got {row!r}')
    name, group, number = written[1], int(written[2]), int(written[3])
    if name not in names:
        raise DataError(f"the dataset has no file {name!r}; {nearest(name, names)}")
    file = names.index(name)
    fragments = {int(source.fragment_groups[each]): each for each in (source.fragment_files == file).nonzero()[0]}
    if group not in fragments or number >= source.fragment_rows[fragments[group]]:
        some = list(fragments.items())[:8]
        there = ", ".join(f"{source.fragment_rows[fragment]} in group {each}" for each, fragment in some)
        raise DataError(f"{name} has no row {number} in row group {group}; its rows are {there or 'none'}")
    return _row(source, fragments[group], number)


def _first(rows: Rows, number: int = 0) -> dict[str, Any]:
    row = {name: column[number] for name, column in rows.items()}
    return {name: each.tolist() if isinstance(each, np.ndarray | np.generic) else each for name, each in row.items()}


def _row(source: Source, fragment: int, number: int) -> dict[str, Any]:
    """Return a row exactly as it is in the file, including nulls, which training would reject."""
    table = read_group(source.fragment(fragment)).slice(number, 1)
    shaped = [field.name for field in table.schema if shape_of(field) is not None]
    row: dict[str, Any] = table.to_pylist()[0] | _first(to_rows(table.select(shaped)))
    return row


def _kind_of(field: pa.Field) -> str:
    shape = shape_of(field)
    return str(field.type) if shape is None else f"uint8{shape or ''}"


def _type_of(column: Any) -> str:
    if column.dtype != object:
        return f"{column.dtype}{list(column.shape[1:]) or ''}"
    return type(next((each for each in column if each is not None), None)).__name__


def _short(value: Any, *, length: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= length else text[: length - 4].rstrip(" ,") + " ..."


def _bytes(size: int) -> str:
    amount = float(size)
    for unit in ("bytes", "KB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"
