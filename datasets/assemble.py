"""Cuts rows, which come fragment by fragment, into one rank's micro-batches, which take some rows of many fragments."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from .collate import Rows, num_rows, same_kind
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
    """

    micro_batches: Sequence[dict[str, Any]]
    num_samples: Sequence[int]
    global_num_samples: int


class Shelves:
    """Rows that have been read and not yet used, one shelf for each logical shard.

    Args:
        asked: the reads whose rows are to come, in this order; grows while rows arrive.
        chunks: the rows of these reads, one after the other, cut anywhere.
        spare: returns one row to fill a micro-batch with, for a rank that never had any.
    """

    def __init__(self, asked: deque[Read], chunks: Iterator[Rows], spare: Callable[[], Rows]) -> None:
        self._asked = asked
        self._chunks = chunks
        self._spare = spare
        self._arrived: Part = {}, 0, 0
        self._shelves: defaultdict[int, deque[Part]] = defaultdict(deque)
        self._last: Part | None = None

    def clear(self) -> None:
        """Throws away what the tail policy dropped, before the next epoch's rows arrive."""
        self._shelves.clear()

    def batch(self, batch: Batch, *, pinned: bool = False) -> GlobalBatch:
        """Returns the rows of one batch, as tensors; waits for rows that have not arrived."""
        parts = [part for shard, rows in batch.takes for part in self._take(shard, rows)]
        if parts:
            rows, _, stop = parts[-1]
            self._last = {name: column[stop - 1 : stop].copy() for name, column in rows.items()}, 0, 1
        elif self._last is None:
            self._last = self._spare(), 0, 1
        micro_batches = [
            _tensors(each or [self._last], pinned=pinned)  # type: ignore[list-item]
            for each in _cut(parts, batch.sizes)
        ]
        return GlobalBatch(micro_batches, batch.sizes, batch.global_num_samples)

    def _take(self, shard: int, rows: int) -> Iterator[Part]:
        shelf = self._shelves[shard]
        while rows:
            while not shelf:
                self._receive()
            columns, start, stop = shelf[0]
            taken = min(rows, stop - start)
            yield columns, start, start + taken
            if start + taken == stop:
                shelf.popleft()
            else:
                shelf[0] = columns, start + taken, stop
            rows -= taken

    def _receive(self) -> None:
        """Puts the rows of one read onto the shelves."""
        self._arrive()  # first: only what has arrived has certainly been asked for
        for each in self._asked.popleft().slices:
            missing = each.stop - each.start
            while missing:
                self._arrive()
                rows, at, end = self._arrived
                taken = min(missing, end - at)
                self._shelves[each.shard].append((rows, at, at + taken))
                self._arrived = rows, at + taken, end
                missing -= taken

    def _arrive(self) -> None:
        _, at, end = self._arrived
        if at == end:
            rows = next(self._chunks)
            self._arrived = rows, 0, num_rows(rows)


def _cut(parts: list[Part], sizes: Iterable[int]) -> Iterator[list[Part]]:
    todo = deque(parts)
    for size in sizes:
        some: list[Part] = []
        while size:
            rows, start, stop = todo.popleft()
            taken = min(size, stop - start)
            some.append((rows, start, start + taken))
            if start + taken < stop:
                todo.appendleft((rows, start + taken, stop))
            size -= taken
        yield some


def _tensors(parts: list[Part], *, pinned: bool) -> dict[str, Any]:
    return {name: _column([rows[name][start:stop] for rows, start, stop in parts], pinned) for name in parts[0][0]}


def _column(pieces: list[Any], pinned: bool) -> Any:
    if not same_kind(pieces):
        return [
            torch.from_numpy(np.array(row)) if isinstance(row, np.ndarray) else row for piece in pieces for row in piece
        ]
    shape = (sum(len(piece) for piece in pieces), *pieces[0].shape[1:])
    kind = torch.from_numpy(np.empty(0, pieces[0].dtype)).dtype
    # Once, and where the batch is to lie: the arrays are views of what was read, which nobody may write to.
    tensor = torch.empty(shape, dtype=kind, pin_memory=pinned)
    np.concatenate(pieces, out=tensor.numpy())
    return tensor
