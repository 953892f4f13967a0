"""Describes a dataset, and looks up single rows (`headway data show`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .errors import DataError
from .paths import Paths, nearest
from .row_groups import read_group
from .sources import Source, read_source


@dataclass(frozen=True)
class Description:
    """Summary of a dataset.

    Attributes:
        path: the path given.
        rows, files, fragments: number of rows, files and row groups.
        size_bytes: total size of the files.
        columns: {name: type}.
        fingerprint: changes when the data changes.
        first_row: {column: value} of the first row, in file order.
    """

    path: str
    rows: int
    files: int
    fragments: int
    size_bytes: int
    columns: dict[str, str]
    fingerprint: str
    first_row: dict[str, Any]

    def __str__(self) -> str:
        width = max(len(name) for name in self.columns)
        lines = [
            f"{self.path}",
            f"  rows         {self.rows:,}",
            f"  fragments    {self.fragments:,} row groups in {self.files:,} files",
            f"  size         {_bytes(self.size_bytes)}",
            f"  fingerprint  {self.fingerprint}",
            "  columns and the first row",
        ]
        kind = max(len(each) for each in self.columns.values())
        for name, each in self.columns.items():
            lines.append(f"    {name:<{width}}  {each:<{kind}}  {_short(self.first_row[name])}")
        return "\n".join(lines)


def describe(path: Paths, *, columns: Sequence[str] | None = None) -> Description:
    """Summarize a dataset from its footers and its first row.

    Raises:
        DataError: the dataset is missing or damaged.
    """
    source = read_source(path, columns=columns)
    return Description(
        path=str(path) if not isinstance(path, (list, tuple)) else ", ".join(map(str, path)),
        rows=source.rows,
        files=len(source.files),
        fragments=len(source.fragment_rows),
        size_bytes=sum(file.size_bytes for file in source.files),
        columns={field.name: str(field.type) for field in source.schema},
        fingerprint=source.fingerprint,
        first_row=_row(source, 0, 0),
    )


def read_row(path: Paths, row: str, *, columns: Sequence[str] | None = None) -> dict[str, Any]:
    """Return a row by its id, as shown in errors and in a checkpoint's resume check, or returned by `row_ids()`.

    Args:
        path: the whole dataset; file names in ids are relative to the common folder of all files.
        row: "<file>[<row group>]:<row in it>", counted from 0.
        columns: columns to return; None for all. Files may differ in other columns.

    Returns:
        {column: value}.

    Raises:
        DataError: there is no such row.
    """
    source = read_source(path, columns=columns)
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


def _row(source: Source, fragment: int, number: int) -> dict[str, Any]:
    """Return a row exactly as it is in the file, including nulls, which training would reject."""
    table = read_group(source.fragment(fragment))
    row: dict[str, Any] = table.slice(number, 1).to_pylist()[0]
    return row


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
