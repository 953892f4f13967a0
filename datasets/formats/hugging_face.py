"""A map-style dataset of Hugging Face as a source, read as Arrow. Its package is not imported here."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..arrow import Rows, to_rows
from ..errors import DataError
from ..paths import nearest

_FRAGMENT_ROWS = 1024
_SAMPLE_ROWS = 16


@dataclass(frozen=True)
class HuggingFace:
    """A `datasets.Dataset`, to be read by a `Stream`, alone or as a part of a mixture.

    Columns become what the same columns of a Parquet file become; images and audio are dicts with their bytes, to be
    decoded in a transform. The id of a row is its index. With Ray, a dataset that is not on disk is sent with every
    task: save it first, or use engine="threads".

    Args:
        dataset: a map-style dataset, also after `select`, `filter` or `map`; not a `DatasetDict` or an
            `IterableDataset`.
        columns: columns to read; None for all, or for those that `set_format` or `with_format` has selected.
        version: changes when you change the data. Without it, only the number of rows, the types, and the first and
            last 16 rows are compared when a run is resumed.

    Example:
        >>> from headway.datasets.formats.hugging_face import HuggingFace
        >>> def data(dataset):  # such as datasets.load_dataset("wikitext", "wikitext-2-v1", split="train")
        ...     return HuggingFace(dataset, columns=["text"], version="2026-11")
    """

    dataset: Any
    columns: Sequence[str] | None = None
    version: str = ""

    def __post_init__(self) -> None:
        if not all(hasattr(self.dataset, name) for name in ("with_format", "select", "__len__")):
            raise DataError(
                f"dataset must be a map-style Dataset of Hugging Face, such as load_dataset(..., split='train'), got "
                f"{type(self.dataset).__name__}"
            )
        if getattr(self.dataset, "format", {}).get("type") == "custom":
            raise DataError(
                "dataset has a function from set_transform or with_transform, which would not be called: pass one to "
                "the stream, in `transforms`, where it gets an array for each column, or use dataset.map"
            )

    def open(self) -> HuggingFaceSource:
        """Select the columns.

        Raises:
            DataError: the dataset is empty, or a column is missing.
        """
        names = list(self.dataset.column_names)
        formatted = list(getattr(self.dataset, "format", {}).get("columns") or names)
        for name in self.columns or ():
            if name not in names:
                raise DataError(f"the dataset has no column {name!r}; {nearest(name, names)}")
        if not len(self.dataset):
            raise DataError("the dataset has no rows")
        selected = self.dataset.select_columns(list(self.columns or formatted))
        return HuggingFaceSource(selected.with_format("arrow"), self.version)

    def __str__(self) -> str:
        return f"a {type(self.dataset).__name__} of {len(self.dataset)} rows"


class HuggingFaceRows(NamedTuple):
    """A fragment: the rows of a dataset from `start` to before `stop`."""

    dataset: Any
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.stop - self.start

    def read(self) -> Rows:
        """Return all rows.

        Raises:
            DataError: the rows cannot be read, or a numeric column has nulls.
        """
        try:
            return to_rows(self.dataset[self.start : self.stop])
        except (DataError, OSError, pa.ArrowException) as error:
            raise DataError(f"rows {self.start} to {self.stop - 1} of the dataset: {error}") from error


@dataclass(frozen=True)
class HuggingFaceSource:
    """An opened dataset.

    Attributes:
        dataset: gives Arrow tables.
        version: see `HuggingFace`.
    """

    dataset: Any
    version: str

    @property
    def rows(self) -> int:
        """Number of rows."""
        rows: int = len(self.dataset)
        return rows

    @property
    def skipped_rows(self) -> int:
        """No row is left out."""
        return 0

    @cached_property
    def fragment_rows(self) -> npt.NDArray[np.int64]:
        """Rows of each fragment."""
        return np.diff(np.append(np.arange(0, self.rows, _FRAGMENT_ROWS), self.rows)).astype(np.int64)

    @cached_property
    def row_bytes(self) -> int:
        """Approximate size of a row."""
        size: int = self._first.nbytes
        return max(1, size // len(self._first))

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits of the version, the number of rows, the types, and the first and last rows."""
        rows = [self._first.to_pylist(), self.dataset[max(0, self.rows - _SAMPLE_ROWS) : self.rows].to_pylist()]
        types = [(field.name, str(field.type)) for field in self._first.schema]
        return hashlib.sha256(repr((self.version, self.rows, types, rows)).encode()).hexdigest()[:16]

    def fragment(self, index: int) -> HuggingFaceRows:
        """Return a fragment."""
        start = index * _FRAGMENT_ROWS
        return HuggingFaceRows(self.dataset, start, start + int(self.fragment_rows[index]))

    def row_name(self, index: int, row: int) -> str:
        """Return the index of a row of a fragment."""
        return str(index * _FRAGMENT_ROWS + row)

    @cached_property
    def _first(self) -> pa.Table:
        return self.dataset[: min(_SAMPLE_ROWS, self.rows)]
