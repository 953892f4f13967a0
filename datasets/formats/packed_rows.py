"""Packed rows in a local file, written once when their index is built, and read in whole groups."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..arrow import Rows
from .token_file import read_group


class PackedRows(NamedTuple):
    """A fragment: a group of packed rows.

    Attributes:
        path: the file with the tokens of all rows, as int32.
        first, num_rows, row_length: the rows of the group in it.
        checksum: of their tokens.
        starts: int32, where each piece of a document begins in the group, counted in tokens, and where each padding
            begins; ascending, from 0.
        ids: int32, the number of each of these pieces in its row; -1 for padding.
    """

    path: str
    first: int
    num_rows: int
    row_length: int
    checksum: int
    starts: npt.NDArray[np.int32]
    ids: npt.NDArray[np.int32]

    def read(self) -> Rows:
        """Return all rows of the group.

        Raises:
            DataError: the file is missing or has changed.
        """
        size = self.num_rows * self.row_length
        tokens = read_group(self.path, self.first * self.row_length, size, self.checksum)
        lengths = np.diff(self.starts, append=np.int32(size))
        positions = np.arange(size, dtype=np.int32)
        positions -= np.repeat(self.starts, lengths)
        document_ids = np.repeat(self.ids, lengths)
        mask = document_ids >= 0
        if not mask.all():
            positions *= mask
        columns = {"tokens": tokens, "document_ids": document_ids, "positions": positions, "mask": mask}
        return {name: column.reshape(self.num_rows, self.row_length) for name, column in columns.items()}
