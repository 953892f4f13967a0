"""What is in a dataset, for a person to look at."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import DataError
from .reading import Job, read
from .sources import Paths, nearest, read_source


@dataclass(frozen=True)
class Description:
    """A dataset at a glance.

    Attributes:
        path: where it was looked for.
        rows, files, fragments: how much there is; a fragment is a row group.
        size_bytes: of the files.
        columns: name: type.
        fingerprint: changes when the data changes.
        first_row: column: value, in the order of the files.
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
    """Looks at a dataset: its footers, and one row.

    Raises:
        DataError: there is no dataset, or it is damaged.
    """
    source = read_source(path, columns=columns)
    rows = read(
        Job(
            path=source.files[source.fragment_files[0]].path,
            digest=source.files[source.fragment_files[0]].digest,
            group=int(source.fragment_groups[0]),
            num_rows=int(source.fragment_rows[0]),
            columns=tuple(source.columns),
            order=None,
            ranges=((0, 1),),
        )
    )
    return Description(
        path=str(path) if not isinstance(path, (list, tuple)) else ", ".join(map(str, path)),
        rows=source.rows,
        files=len(source.files),
        fragments=len(source.fragment_rows),
        size_bytes=sum(file.size_bytes for file in source.files),
        columns={field.name: str(field.type) for field in source.schema},
        fingerprint=source.fingerprint,
        first_row={name: _plain(column[0]) for name, column in rows.items()},
    )


def read_row(path: Paths, row: str) -> dict[str, Any]:
    """Looks a row up by what it is called in an error, a checkpoint's certificate or a batch's `row_ids()`.

    Args:
        path: the whole dataset: files are named relative to what they have in common.
        row: "<file>[<row group>]:<row in it>", counted from 0.

    Returns:
        column: value.

    Raises:
        DataError: there is no such row.
    """
    source = read_source(path)
    names = [file.name for file in source.files]
    written = re.fullmatch(r"(.+)\[(\d+)\]:(\d+)", row)
    if written is None:
        raise DataError(f'a row is called like "{names[0]}[0]:17" (file, row group, row in it), not {row!r}')
    name, group, number = written[1], int(written[2]), int(written[3])
    if name not in names:
        raise DataError(f"the dataset has no file {name!r}; {nearest(name, names)}")
    file = names.index(name)
    groups = dict(
        zip(
            source.fragment_groups[source.fragment_files == file].tolist(),
            source.fragment_rows[source.fragment_files == file].tolist(),
            strict=True,
        )
    )
    if number >= groups.get(group, 0):
        there = ", ".join(f"{rows} in group {each}" for each, rows in list(groups.items())[:8])
        raise DataError(f"{name} has no row {number} in row group {group}; its rows are {there or 'none'}")
    rows = read(
        Job(
            path=source.files[file].path,
            digest=source.files[file].digest,
            group=group,
            num_rows=groups[group],
            columns=tuple(source.columns),
            order=None,
            ranges=((number, number + 1),),
        )
    )
    return {name: _plain(column[0]) for name, column in rows.items()}


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


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
