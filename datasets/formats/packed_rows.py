"""Packed rows in a local file, written once when their index is built, and read in whole groups."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..arrow import Rows
from .token_file import read_group

# Few enough that the arrays on the way stay in the cache of a core.
_TOKENS_AT_A_TIME = 2**17

PIECES = "headway: pieces"
"""The column that compact rows have instead of `document_ids`, `positions` and `mask`: uint8 [B, length / 8 + 1], a bit
for each token that begins a piece, and a byte that is 1 where the last piece is padding."""

DERIVED: dict[str, npt.DTypeLike] = {"document_ids": np.int32, "positions": np.int32, "mask": np.bool_}
"""The columns that follow from it, with their types."""


class PackedRows(NamedTuple):
    """A fragment: a group of packed rows.

    Attributes:
        path: the file with the tokens of all rows, as int32.
        first, num_rows, row_length: the rows of the group in it.
        checksum: of their tokens.
        starts: int32, where each piece of a document begins in the group, counted in tokens, and where each padding
            begins; ascending, from 0.
        ids: int32, the number of each of these pieces in its row; -1 for padding.
        compact: whether rows have the column `PIECES`, a third of the bytes, from which batches derive the others.
    """

    path: str
    first: int
    num_rows: int
    row_length: int
    checksum: int
    starts: npt.NDArray[np.int32]
    ids: npt.NDArray[np.int32]
    compact: bool = False

    def read(self) -> Rows:
        """Return all rows of the group.

        Raises:
            DataError: the file is missing or has changed.
        """
        size = self.num_rows * self.row_length
        tokens = read_group(self.path, self.first * self.row_length, size, self.checksum)
        rows: Rows = {"tokens": tokens.reshape(self.num_rows, self.row_length), PIECES: self._pieces()}
        if not self.compact:
            derived: Rows = {name: np.empty((self.num_rows, self.row_length), dtype) for name, dtype in DERIVED.items()}
            derive(rows.pop(PIECES), *derived.values())
            rows |= derived
        return rows

    def _pieces(self) -> npt.NDArray[np.uint8]:
        begins = np.zeros((self.num_rows, self.row_length), np.bool_)
        begins.reshape(-1)[self.starts] = True
        padded = np.zeros((self.num_rows, 1), np.uint8)
        padded[self.starts[self.ids < 0] // self.row_length] = 1
        return np.concatenate([np.packbits(begins, axis=1), padded], axis=1)


def derive(
    pieces: npt.NDArray[np.uint8],
    document_ids: npt.NDArray[np.int32],
    positions: npt.NDArray[np.int32],
    mask: npt.NDArray[np.bool_],
) -> None:
    """Write the columns that follow from the pieces of rows.

    Args:
        pieces: the column `PIECES` of B rows.
        document_ids: array [B, length] to write to.
        positions: the same.
        mask: the same.
    """
    rows, length = document_ids.shape
    begins = np.unpackbits(pieces[:, :-1], axis=1, count=length).reshape(-1)
    bounds = np.append(np.flatnonzero(begins.view(np.bool_)), begins.size)
    lengths = np.diff(bounds)
    starts = bounds[:-1].astype(np.int32)
    # A piece begins at each row, and ends at the latest with it.
    row_bounds = np.searchsorted(bounds, np.arange(0, begins.size + 1, length))
    numbers = np.arange(len(starts), dtype=np.int32)
    numbers -= np.repeat(numbers[row_bounds[:-1]], np.diff(row_bounds))
    numbers[row_bounds[1:][pieces[:, -1] != 0] - 1] = -1
    in_documents = numbers >= 0
    step = max(1, _TOKENS_AT_A_TIME // length)
    within = np.arange(min(step, rows) * length, dtype=np.int32)
    for first in range(0, rows, step):
        stop = min(first + step, rows)
        here = slice(row_bounds[first], row_bounds[stop])
        ids, places, real = (each[first:stop].reshape(-1) for each in (document_ids, positions, mask))
        ids[:] = np.repeat(numbers[here], lengths[here])
        real[:] = np.repeat(in_documents[here], lengths[here])
        np.subtract(
            within[: len(places)], np.repeat(starts[here] - np.int32(first * length), lengths[here]), out=places
        )
        places[~real] = 0
