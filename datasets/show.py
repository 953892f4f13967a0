"""What is in a dataset, for a person to look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .reading import Job, read
from .sources import Paths, read_source


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
