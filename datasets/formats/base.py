"""What a format must provide so that a stream can read it: fragments with row counts, and a fingerprint.

Runs in Ray Data's workers too, so it imports neither torch nor Ray.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, get_args

import numpy as np
import numpy.typing as npt

from ..arrow import Rows
from ..errors import DataError

OnBadRow = Literal["raise", "skip"]


def check_options(columns: Sequence[str] | None, on_bad_row: str, name: str = "columns") -> None:
    """Check the options that formats share.

    Args:
        columns: the option `name`, a list of names.
        on_bad_row: what happens to damaged rows.
        name: the name of the first option.

    Raises:
        DataError: `columns` is a str or empty, or `on_bad_row` is neither "raise" nor "skip".
    """
    if on_bad_row not in get_args(OnBadRow):
        raise DataError(f"on_bad_row must be 'raise' or 'skip', got {on_bad_row!r}")
    if isinstance(columns, str) or (columns is not None and not len(columns)):
        raise DataError(f"{name} must be a list of names, or None for all, got {columns!r}")


def check_format(data: object, name: str = "data") -> None:
    """Raise a `DataError` if `data`, the argument `name`, is no `DataFormat`."""
    if isinstance(data, type) or not callable(getattr(data, "open", None)) or isinstance(data, os.PathLike):
        if hasattr(data, "iter_torch_batches"):
            raise DataError(
                f"{name} must be data of a format, got a {type(data).__name__} of Ray Data: in place of the Stream, "
                "return RayDataset(dataset), from headway.datasets.formats.ray_dataset"
            )
        raise DataError(
            f"{name} must be data of a format, such as JsonLines(path), Parquet(path), WebDataset(path), Images(path) "
            f"or HuggingFace(dataset), got a {type(data).__name__}"
        )


class Fragment(Protocol):
    """The smallest unit that is read: a row group, or a range of lines. Can be pickled."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""

    def read(self) -> Rows:
        """Return all rows, in the order of the file.

        Raises:
            DataError: the data is missing, has changed or is damaged. Names the file and the place in it.
        """


class SomeRows(NamedTuple):
    """Some rows of a fragment, in this order; see `take`."""

    fragment: Fragment
    rows: slice | npt.NDArray[np.int64]

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(np.arange(self.fragment.num_rows)[self.rows])

    def read(self) -> Rows:
        """Return these rows."""
        return {name: column[self.rows] for name, column in self.fragment.read().items()}


def take(fragment: Fragment, rows: slice | npt.NDArray[np.int64]) -> Fragment:
    """Return some rows of a fragment, by its method `take` if it has one: then only these are fetched and decoded."""
    own = getattr(fragment, "take", None)
    taken: Fragment = SomeRows(fragment, rows) if own is None else own(rows)
    return taken


def decodes_some_rows(fragment: Fragment) -> bool:
    """Return whether a read of some rows of the fragment decodes no others."""
    return hasattr(getattr(fragment, "fragment", fragment), "take")  # a mixture wraps the fragments of its sources


def is_fetched_whole(fragment: Fragment) -> bool:
    """Return whether each read of some rows fetches all rows of the fragment from a remote storage."""
    inner = getattr(fragment, "fragment", fragment)  # a mixture wraps the fragments of its sources
    is_cached = getattr(inner, "cached", None) is not None
    return "://" in getattr(inner, "path", "") and not is_cached and not hasattr(inner, "take")


class RowSource(Protocol):
    """An opened dataset: a list of fragments."""

    @property
    def rows(self) -> int:
        """Number of rows of all fragments."""

    @property
    def fragment_rows(self) -> npt.NDArray[np.int64]:
        """Rows of each fragment; at least 1."""

    @property
    def row_bytes(self) -> int:
        """Approximate size of a row in memory."""

    @property
    def fingerprint(self) -> str:
        """Changes when the rows change, but not when the data is moved."""

    @property
    def skipped_rows(self) -> int:
        """Rows that are left out because they are damaged, as the user has asked."""

    def fragment(self, index: int) -> Fragment:
        """Return a fragment."""

    def row_name(self, index: int, row: int) -> str:
        """Return the id of a row of a fragment, for errors."""


class DataFormat(Protocol):
    """A dataset as users name it. Creating it does no I/O."""

    def open(self) -> RowSource:
        """Find the data, and read or build its index.

        Raises:
            DataError: the data is missing or damaged, or does not fit the options.
        """

    def __str__(self) -> str:
        """Return a short name for errors, such as the path."""
