"""Rows that have been read but not used yet, from which micro-batches are made."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..arrow import Rows, num_rows
from ..errors import DataError
from ..formats.derived_columns import expand_packed
from ..plan import Batch, Read
from .micro_batches import GlobalBatch, cut_all, gather_column, take_all
from .spill import Spill, SpilledRows

Part: TypeAlias = tuple[Rows, int, int]
"""(columns, start, stop): some consecutive rows of these columns."""


class ShardBuffers:
    """Rows that have been read but not used yet, in one buffer per logical shard.

    Args:
        asked: reads whose rows are still to arrive, in this order; grows while rows arrive.
        chunks: the rows of these reads in order, in chunks of any length.
        filler_row: returns one row, to fill a micro-batch of a rank that has not had any.
        same_types: refuse rows with other columns or types of numbers than the first ones.
        rows_are_batches: each row is a padded batch, and a micro-batch. Micro-batches have one row then.
        in_memory: returns how many rows of a shard stay in memory while the others wait in a temporary file; None for
            all.

    Raises:
        SpillError: from `batches`; rows cannot be kept in a temporary file.
    """

    def __init__(
        self,
        asked: deque[Read],
        chunks: Iterator[Rows],
        filler_row: Callable[[], Rows],
        *,
        same_types: bool = False,
        rows_are_batches: bool = False,
        in_memory: Callable[[int], int | None] = lambda shard: None,
    ) -> None:
        self._asked = asked
        self._chunks = chunks
        self._filler_row = filler_row
        self._arrived: Part = {}, 0, 0
        self._buffers: defaultdict[int, deque[Part | SpilledRows]] = defaultdict(deque)
        self._in_memory = in_memory
        self._spill: Spill | None = None
        self._last: Rows | None = None
        self._same_types = same_types
        self._cut_all = take_all if rows_are_batches else cut_all
        self._types: dict[str, str] | None = None

    def clear(self) -> None:
        """Discard the rows that the tail policy dropped, before the next epoch's rows arrive."""
        self._buffers.clear()

    def skip(self, shard_counts: Sequence[tuple[int, int]]) -> None:
        """Discard the next rows of some shards; waits for those that have not arrived."""
        for shard, rows in shard_counts:
            for _ in self._take(shard, rows):
                pass

    def batches(
        self, batches: Sequence[Batch], names: Sequence[Callable[[], Sequence[str]]], *, pin_memory: bool = False
    ) -> list[GlobalBatch]:
        """Return the next batches, one for each of `names`, as tensors; waits for rows that have not arrived.

        Either all have rows of this rank or none has. Making several at a time is cheaper: a batch takes only a few
        rows of each shard, and a shard's rows for all the batches are contiguous.
        """
        ends = list(accumulate(sum(each.sizes) for each in batches))
        if not ends[-1]:
            rows = self._last = self._last or self._filler_row()
            columns = expand_packed(
                {name: gather_column([(column, np.zeros(1, np.intp))], 1, pin_memory) for name, column in rows.items()},
                pin_memory,
            )
            return [
                GlobalBatch(self._cut_all(columns, 0, each.sizes), each.sizes, each.global_num_samples, of)
                for each, of in zip(batches, names, strict=True)
            ]
        # The positions of each shard's rows, one shard after the other.
        shards = np.repeat(*np.array([pair for each in batches for pair in each.shard_counts], dtype=np.intp).T)
        order = np.argsort(shards, kind="stable")
        begins = np.flatnonzero(np.diff(shards[order], prepend=-1))
        parts, part_positions = [], []
        for shard, at, count in zip(
            *(shards[order[begins]].tolist(), begins.tolist(), np.diff(begins, append=len(order)).tolist()), strict=True
        ):
            for part in self._take(shard, count):
                size = part[2] - part[1]
                parts.append(part)
                part_positions.append(order[at : at + size])
                at += size
        rows, _, stop = parts[-1]
        self._last = {name: column[stop - 1 : stop].copy() for name, column in rows.items()}
        columns = {
            name: gather_column(
                [
                    (rows[name][start:stop], positions)
                    for (rows, start, stop), positions in zip(parts, part_positions, strict=True)
                ],
                len(order),
                pin_memory,
            )
            for name in rows
        }
        columns = expand_packed(columns, pin_memory)
        return [
            GlobalBatch(
                self._cut_all(columns, end - sum(each.sizes), each.sizes), each.sizes, each.global_num_samples, of
            )
            for each, end, of in zip(batches, ends, names, strict=True)
        ]

    def _take(self, shard: int, rows: int) -> Iterator[Part]:
        buffer = self._buffers[shard]
        while rows:
            while not buffer:
                self._receive()
            head = buffer[0]
            if isinstance(head, SpilledRows):
                columns = head.read()
                start, stop = 0, num_rows(columns)
            else:
                columns, start, stop = head
            taken = min(rows, stop - start)
            yield columns, start, start + taken
            if start + taken == stop:
                buffer.popleft()
            else:
                buffer[0] = columns, start + taken, stop
            rows -= taken

    def _receive(self) -> None:
        """Add the rows of one read to the buffers."""
        self._arrive()  # first: a read is certain to be in `asked` only once its rows have arrived
        for each in self._asked.popleft().slices:
            missing = each.stop - each.start
            while missing:
                self._arrive()
                rows, at, end = self._arrived
                taken = min(missing, end - at)
                self._add(each.shard, rows, at, at + taken)
                self._arrived = rows, at + taken, end
                missing -= taken

    def _add(self, shard: int, rows: Rows, start: int, stop: int) -> None:
        """Add consecutive rows to a buffer. In parts, so that it need not hold all of what arrives together."""
        buffer, most = self._buffers[shard], self._in_memory(shard)
        if most is None:
            buffer.append((rows, start, stop))
            return
        ends = [*range(start, stop, most), stop]
        pieces = [{name: column[first:end] for name, column in rows.items()} for first, end in pairwise(ends)]
        # Numbers are copied, so that the other rows need not be held. Objects may be parts of what has been read.
        if not buffer and all(column.dtype != object for column in rows.values()):
            copied = {name: column.copy() for name, column in pieces.pop(0).items()}
            buffer.append((copied, 0, num_rows(copied)))
        if pieces:
            self._spill = self._spill or Spill()
            buffer.extend(self._spill.put(pieces))

    def _arrive(self) -> None:
        _, at, end = self._arrived
        if at == end:
            rows = next(self._chunks)
            if self._same_types:
                types = {name: _type_name(column) for name, column in rows.items()}
                self._types = self._types or types
                if types != self._types:
                    raise DataError(
                        f"some rows have the columns {self._types} and others {types}: the sources of a mixture must "
                        "give the same. Select columns, or convert them in a transform"
                    )
            self._arrived = rows, 0, num_rows(rows)


def _type_name(column: npt.NDArray[Any]) -> str:
    """Return the type of a column; arrays of one length and of several are both "list of int64"."""
    if column.dtype != object:
        return str(column.dtype) if column.ndim == 1 else f"list of {column.dtype}"
    first = next((each for each in column if each is not None), None)
    return f"list of {first.dtype}" if isinstance(first, np.ndarray) else "objects"
