"""Cuts rows, which come fragment by fragment, into one rank's micro-batches, which take some rows of many fragments."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from .arrow import NUMBERS, Rows, is_stackable, num_rows
from .plan import Batch, Read

Part: TypeAlias = tuple[Rows, int, int]
"""Rows `start` to `stop` of some columns."""


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """This rank's part of the samples of one optimizer update.

    Attributes:
        micro_batches: columns as tensors [B, ...] or, for what is no number, lists of B Python objects.
        num_samples: rows of each micro-batch that count; 0 marks a repeated row, there to keep the ranks in step.
        global_num_samples: rows of the update over all ranks.
        name_rows: says what the rows that count are called in the data, in their order.
    """

    micro_batches: Sequence[dict[str, Any]]
    num_samples: Sequence[int]
    global_num_samples: int
    name_rows: Callable[[], Sequence[str]]

    def row_ids(self) -> list[Sequence[str]]:
        """Returns the rows of each micro-batch as "<file>[<row group>]:<row in it>"; works them out when asked."""
        names, ends = self.name_rows(), list(accumulate(self.num_samples))
        return [names[end - size : end] for size, end in zip(self.num_samples, ends, strict=True)]


class ShardBuffers:
    """Rows that have been read and not yet used, one buffer for each logical shard.

    Args:
        asked: the reads whose rows are to come, in this order; grows while rows arrive.
        chunks: the rows of these reads, one after the other, cut anywhere.
        filler_row: returns one row to fill a micro-batch with, for a rank that never had any.
    """

    def __init__(self, asked: deque[Read], chunks: Iterator[Rows], filler_row: Callable[[], Rows]) -> None:
        self._asked = asked
        self._chunks = chunks
        self._filler_row = filler_row
        self._arrived: Part = {}, 0, 0
        self._buffers: defaultdict[int, deque[Part]] = defaultdict(deque)
        self._last: Rows | None = None

    def clear(self) -> None:
        """Throws away what the tail policy dropped, before the next epoch's rows arrive."""
        self._buffers.clear()

    def batches(
        self, batch: Batch, names: Sequence[Callable[[], Sequence[str]]], *, pinned: bool = False
    ) -> list[GlobalBatch]:
        """Returns the next batches, one for each of `names`, as tensors; waits for rows that have not arrived.

        They are alike. Several at a time because a batch takes a row or two of each of many shards: a shard's rows for
        all of them lie together.
        """
        own, times = sum(batch.sizes), len(names)
        if not own:
            rows = self._last = self._last or self._filler_row()
            columns = {
                name: gather_column([(column, np.zeros(1, np.intp))], 1, pinned) for name, column in rows.items()
            }
            made = [_cut(columns, range(0, 1)) for _ in batch.sizes]
            return [GlobalBatch(made, batch.sizes, batch.global_num_samples, each) for each in names]
        parts, places, before = [], [], 0
        for shard, count in batch.shard_counts:
            place = (np.arange(times)[:, None] * own + np.arange(before, before + count)).reshape(-1)
            for rows, start, stop in self._take(shard, count * times):
                parts.append((rows, start, stop))
                places.append(place[: stop - start])
                place = place[stop - start :]
            before += count
        rows, _, stop = parts[-1]
        self._last = {name: column[stop - 1 : stop].copy() for name, column in rows.items()}
        columns = {
            name: gather_column(
                [(rows[name][start:stop], place) for (rows, start, stop), place in zip(parts, places, strict=True)],
                own * times,
                pinned,
            )
            for name in rows
        }
        ends = [sum(batch.sizes[: i + 1]) for i in range(len(batch.sizes))]
        return [
            GlobalBatch(
                # Rows are missing only where a rank has fewer than micro-batches: its last row stands in.
                [
                    _cut(columns, range(first + end - (size or 1), first + end) if end else range(first, first + 1))
                    for size, end in zip(batch.sizes, ends, strict=True)
                ],
                batch.sizes,
                batch.global_num_samples,
                name_rows,
            )
            for first, name_rows in zip(range(0, own * times, own), names, strict=True)
        ]

    def _take(self, shard: int, rows: int) -> Iterator[Part]:
        buffer = self._buffers[shard]
        while rows:
            while not buffer:
                self._receive()
            columns, start, stop = buffer[0]
            taken = min(rows, stop - start)
            yield columns, start, start + taken
            if start + taken == stop:
                buffer.popleft()
            else:
                buffer[0] = columns, start + taken, stop
            rows -= taken

    def _receive(self) -> None:
        """Puts the rows of one read onto the buffers."""
        self._arrive()  # first: only what has arrived has certainly been asked for
        for each in self._asked.popleft().slices:
            missing = each.stop - each.start
            while missing:
                self._arrive()
                rows, at, end = self._arrived
                taken = min(missing, end - at)
                self._buffers[each.shard].append((rows, at, at + taken))
                self._arrived = rows, at + taken, end
                missing -= taken

    def _arrive(self) -> None:
        _, at, end = self._arrived
        if at == end:
            rows = next(self._chunks)
            self._arrived = rows, 0, num_rows(rows)


def gather_column(pieces: Sequence[tuple[npt.NDArray[Any], npt.NDArray[np.intp]]], length: int, pinned: bool) -> Any:
    """Lays the pieces of one column at their places: one tensor if they are numbers of one shape, else a list."""
    if not is_stackable([piece for piece, _ in pieces]):
        objects: list[Any] = [None] * length
        for piece, place in pieces:
            for row, at in zip(piece, place.tolist(), strict=True):
                objects[at] = row
        return objects
    first = pieces[0][0]
    # A copy, once, to where the batch is to lie: the pieces are views of what was read, which nobody may write to.
    kind = torch.from_numpy(np.empty(0, first.dtype)).dtype
    tensor = torch.empty((length, *first.shape[1:]), dtype=kind, pin_memory=pinned)
    array = tensor.numpy()
    for piece, place in pieces:
        array[place] = piece
    return tensor


def _cut(columns: dict[str, Any], rows: range) -> dict[str, Any]:
    """Returns some rows of each column; lists of arrays of one shape become a tensor."""
    cut = {name: column[rows.start : rows.stop] for name, column in columns.items()}
    for name, column in cut.items():
        if isinstance(column, list) and any(isinstance(each, np.ndarray) for each in column):
            cut[name] = _to_tensors(column)
    return cut


def _to_tensors(rows: Sequence[Any]) -> Any:
    """One tensor of arrays of one shape, else a list of tensors, of such lists, and of what is no array of numbers."""
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
