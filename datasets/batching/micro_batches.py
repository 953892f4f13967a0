"""A global batch, and the tensors of its micro-batches: columns are gathered from pieces, and cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from ..arrow import NUMBERS, is_stackable
from ..formats.derived_columns import empty, expand_padded


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """This rank's part of the samples of one optimizer update.

    Attributes:
        micro_batches: columns as tensors [B, ...]; columns that are not numeric as lists of B Python objects.
        num_samples: rows of each micro-batch that count. 0 marks a repeated row, which only keeps the ranks in step.
        global_num_samples: rows of the update over all ranks.
        name_rows: returns the ids of the rows that count, in order.
    """

    micro_batches: Sequence[dict[str, Any]]
    num_samples: Sequence[int]
    global_num_samples: int
    name_rows: Callable[[], Sequence[str]]

    def row_ids(self) -> list[Sequence[str]]:
        """Return the row ids of each micro-batch, such as "<file>[<row group>]:<row in it>". Computed on demand."""
        names, ends = self.name_rows(), list(accumulate(self.num_samples))
        return [names[end - size : end] for size, end in zip(self.num_samples, ends, strict=True)]

    def __getitem__(self, key: Any) -> NoReturn:
        """Refuse to be unpacked or indexed as one batch of tensors."""
        raise TypeError(
            "this is a global batch, which may have several micro-batches: "
            "take its tensors from `for micro_batch in run.accumulate(batch)`"
        )


def gather_column(
    pieces: Sequence[tuple[npt.NDArray[Any], npt.NDArray[np.intp]]], length: int, pin_memory: bool
) -> Any:
    """Copy the pieces of one column to their positions: a tensor if they are numbers of one shape, else a list."""
    if not is_stackable([piece for piece, _ in pieces]):
        objects: list[Any] = [None] * length
        for piece, positions in pieces:
            for row, at in zip(piece, positions.tolist(), strict=True):
                objects[at] = row
        return objects
    first = pieces[0][0]
    # Copied once, into the (pin_memory) batch: the pieces are views of read buffers, which must not be written to.
    tensor = empty((length, *first.shape[1:]), first.dtype, pin_memory)
    array = tensor.numpy()
    for piece, positions in pieces:
        array[positions] = piece
    return tensor


def cut_all(columns: dict[str, Any], first: int, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Return micro-batches of these sizes from row `first` on.

    One is empty only if the rank has fewer rows than micro-batches: it repeats the previous row.
    """
    ends = accumulate(sizes)
    return [
        _cut(columns, range(first + end - (size or 1), first + end) if end else range(first, first + 1))
        for size, end in zip(sizes, ends, strict=True)
    ]


def take_all(columns: dict[str, Any], first: int, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Return the same of rows that are padded batches: micro-batches of one row, without the dimension of the rows."""
    return [
        expand_padded({name: column[0] for name, column in micro_batch.items()})
        for micro_batch in cut_all(columns, first, sizes)
    ]


def _cut(columns: dict[str, Any], rows: range) -> dict[str, Any]:
    """Return some rows of each column; a list of arrays of one shape becomes a tensor."""
    cut = {name: column[rows.start : rows.stop] for name, column in columns.items()}
    for name, column in cut.items():
        if isinstance(column, list) and any(isinstance(each, np.ndarray) for each in column):
            cut[name] = _to_tensors(column)
    return cut


def _to_tensors(rows: Sequence[Any]) -> Any:
    """Stack arrays of one shape into a tensor; else return a list, with each numeric array as a tensor."""
    kinds = {(each.dtype, each.shape) if isinstance(each, np.ndarray) else None for each in rows}
    if len(kinds) == 1 and rows[0].dtype.kind in NUMBERS:
        return torch.from_numpy(np.stack(rows))
    return [_to_tensor(each) for each in rows]


def _to_tensor(row: Any) -> Any:
    if not isinstance(row, np.ndarray):
        return row
    if row.dtype == object:
        return [_to_tensor(each) for each in row]
    return torch.from_numpy(row.copy()) if row.dtype.kind in NUMBERS else row
