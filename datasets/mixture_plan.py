"""The order of the rows of a mixture, and where it finds them in its sources. Pure arithmetic, like `plan`.

Logical shard j of a mixture takes its rows from logical shard j of every source, in the order of an `Interleave`. Row k
of a source's shard is in pass k // length over the source, and each pass has its own order, as epochs have. All of this
can be evaluated at any position, so the position of a mixture is one number too.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby, islice
from typing import Literal

import numpy as np
import numpy.typing as npt

from .interleave import Interleave, edges_of
from .plan import Batch, EpochPlan, Read, Tail, shard_range, split_reads

OnEnd = Literal["repeat", "stop", "drop"]

# An interleave seldom gives a shard so many rows of a source more, or fewer, than the weight says.
_DISCREPANCY = 16
# Rows of each shard, for each source, from which on it is cheaper to count the rows of a source by arithmetic than to
# compute the source of each row.
_ROWS_TO_SKIP = 512
# Rows of each shard that are counted together in the search for the end of a source, at first and at most; reads are
# put in order for at least the first, and about the second of all shards together.
_ROWS_AT_A_TIME, _MOST_ROWS_AT_A_TIME = 64, 4096
# Rows of each shard beyond the end of any run.
_ENDLESS = 2**40
# The sources of the rows of this many batches are computed together, which is cheaper.
_BATCHES_AT_A_TIME = 16


@dataclass(frozen=True)
class Layout:
    """What the epochs of a mixture with the same weights have in common.

    Attributes:
        fragment_rows: rows of each fragment, for each source.
        lengths: int64 [sources, shards], rows of each source's logical shards.
        interleave: the source of each row.
        rows: rows of one epoch.
        mixed: rows of each shard that the interleave orders; with "drop" the last few rows of the sources come after
            them, one source after the other.
        on_end: what follows the last row of a source: "repeat", "stop" or "drop".
    """

    fragment_rows: tuple[npt.NDArray[np.int64], ...]
    lengths: npt.NDArray[np.int64]
    interleave: Interleave
    rows: int
    mixed: int
    on_end: OnEnd

    @property
    def shards(self) -> int:
        """Number of logical shards."""
        return self.interleave.shards


def lay_out(
    fragment_rows: Sequence[npt.NDArray[np.int64]],
    weights: Sequence[tuple[int, Sequence[float]]],
    *,
    shards: int,
    rotation: int,
    rows_per_epoch: int,
    on_end: OnEnd,
) -> Layout:
    """Return the layout of a mixture.

    Rows before a change of weights do not depend on it.

    Args:
        fragment_rows: rows of each fragment, for each source; every source has at least one row for each shard.
        weights: (first row of each shard, weight of each source); the first from row 0 on. Unless on_end is "repeat",
            rows count within the epoch.
        shards: number of logical shards.
        rotation: see `Interleave`.
        rows_per_epoch: of an epoch if on_end is "repeat"; rounded up to a multiple of the shards.
        on_end: what follows the last row of a source.
    """
    lengths = _lengths([int(each.sum()) for each in fragment_rows], shards)
    if on_end == "repeat":
        starts, edges = [at for at, _ in weights], [edges_of(each) for _, each in weights]
        mixed = -(-rows_per_epoch // shards)
    else:
        starts, edges, mixed = _until_the_end(lengths, weights, rotation=rotation, stop=on_end == "stop")
    rows = int(lengths.sum()) if on_end == "drop" else mixed * shards
    interleave = Interleave(shards, tuple(starts), tuple(edges), rotation)
    return Layout(tuple(fragment_rows), lengths, interleave, rows, mixed, on_end)


def _until_the_end(
    lengths: npt.NDArray[np.int64], weights: Sequence[tuple[int, Sequence[float]]], *, rotation: int, stop: bool
) -> tuple[list[int], list[tuple[int, ...]], int]:
    """Return the starts and edges of an interleave that leaves out sources that have ended, and its number of rows.

    It ends with the first source if `stop`, and otherwise when no source with a weight is left.
    """
    shards, left, active, at = lengths.shape[1], lengths, np.ones(len(lengths), dtype=bool), 0
    starts: list[int] = []
    edges: list[tuple[int, ...]] = []
    for (_, values), until in zip(weights, [*(start for start, _ in weights[1:]), None], strict=True):
        while at != until:
            current = np.where(active, values, 0.0)
            if not current.any():
                return starts, edges, at
            if starts[-1:] == [at]:  # two sources end at the same row, or one where the weights change
                del starts[-1], edges[-1]
            starts.append(at)
            edges.append(edges_of(current.tolist()))
            phase = Interleave(shards, (at,), (edges[-1],), rotation)
            at, counts = _until_one_ends(phase, left, until)
            left = left - counts
            if at != until:
                if stop:
                    return starts, edges, at
                shard = np.arange(shards)
                following = phase.sources(shard, np.full(shards, at))
                active[following[left[following, shard] == 0]] = False
    raise AssertionError("a source ends at some time")


def _until_one_ends(
    phase: Interleave, left: npt.NDArray[np.int64], until: int | None
) -> tuple[int, npt.NDArray[np.int64]]:
    """Return the first row, at most `until`, for which a shard lacks a row, and the rows of each source before it.

    Args:
        phase: constant weights.
        left: rows that are left of each source's shards when the phase begins.
        until: where the phase ends; None if it does not.
    """
    shards, (row,) = phase.shards, phase.starts
    shares = np.diff(np.array(phase.edges[0], dtype=np.float64)) / 2.0**64
    given = shares > 0
    skip = int(((left[given].min(axis=1) - _DISCREPANCY) / shares[given]).min())
    skip = skip if until is None else min(skip, until - row)
    counts, size = np.zeros_like(left), _ROWS_AT_A_TIME
    while skip > size:  # skip rows that every source still has, by arithmetic, and count the rest row by row
        skipped = np.array([phase.counts(shard, row + skip) for shard in range(shards)]).T
        if (skipped <= left).all():
            row, counts = row + skip, skipped
            break
        skip //= 2
    while row != until:
        end = row + size if until is None else min(row + size, until)
        rows, shard = np.repeat(np.arange(row, end), shards), np.tile(np.arange(shards), end - row)
        places = phase.sources(shard, rows) * shards + shard
        more = np.bincount(places, minlength=left.size).reshape(left.shape)
        if (lacks := np.flatnonzero(counts + more > left)).size:
            # In the order of (source, shard), then of the row: the first row that such a place lacks.
            order = np.argsort(places, kind="stable")
            begin = (np.cumsum(more) - more.reshape(-1))[lacks]
            end = int(rows[order[begin + (left - counts).reshape(-1)[lacks]]].min())
            return end, counts + np.bincount(places[rows < end], minlength=left.size).reshape(left.shape)
        row, counts, size = end, counts + more, min(2 * size, _MOST_ROWS_AT_A_TIME)
    return row, counts


def _lengths(rows: Sequence[int], shards: int) -> npt.NDArray[np.int64]:
    """Return the rows of each source's shards; those of all sources together also differ by at most one."""
    lengths = np.repeat(np.array(rows)[:, None] // shards, shards, axis=1)
    first = 0
    for source, extra in enumerate(each % shards for each in rows):
        lengths[source, (first + np.arange(extra)) % shards] += 1
        first += extra
    return lengths


@dataclass(frozen=True)
class MixturePlan:
    """The order of one epoch of a mixture, with the interface of `EpochPlan`.

    Fragments are numbered through all sources. A shard of a source is numbered `source * shards + shard`.

    Attributes:
        layout: of the mixture.
        seed, epoch: seed of the order.
        shuffle: False keeps the order of each source.
        tail: "keep" yields every row of the epoch; "drop" ends after the last full global batch.
    """

    layout: Layout
    seed: int
    epoch: int
    shuffle: bool = True
    tail: Tail = "drop"

    @property
    def rows(self) -> int:
        """Number of rows of the epoch."""
        return self.layout.rows

    @property
    def continues(self) -> bool:
        """Whether each source continues in the next epoch where this one ends."""
        return self.layout.on_end == "repeat"

    def samples(self, global_batch_size: int, *, offset: int = 0) -> int:
        """Return the offset at which an epoch resumed at `offset` ends, after the tail policy."""
        return self._frame.samples(global_batch_size, offset=offset)

    def steps(self, global_batch_size: int) -> int:
        """Return the number of global batches of the epoch."""
        return self._frame.steps(global_batch_size)

    def reads(
        self,
        *,
        rank: int,
        world_size: int,
        offset: int = 0,
        end: int | None = None,
        parts: Sequence[int | None] = (),
    ) -> Iterator[Read]:
        """Yield the reads of one rank for the samples from `offset` to before `end`, in the order of need.

        Args:
            rank: of the reads.
            world_size: number of ranks.
            offset: samples of the epoch that all ranks together have consumed.
            end: the sample that is not needed any more; None for the end of the epoch.
            parts: rows of a shard that a read of each source returns at most, see `split_reads`; None for all. None
                given: all of every source.
        """
        return self._reads(
            self._rows_of_shards(offset),
            self._rows_of_shards(self.rows if end is None else end),
            rank=rank,
            world_size=world_size,
            parts=parts,
        )

    def endless_reads(
        self, *, rank: int, world_size: int, offset: int = 0, parts: Sequence[int | None] = ()
    ) -> Iterator[Read]:
        """Yield the reads of `reads`, and then of all following epochs; only if this epoch `continues`.

        A fragment in which an epoch ends is read once for both epochs.
        """
        assert self.continues
        begin = self._rows_of_shards(offset)
        return self._reads(begin, begin + _ENDLESS, rank=rank, world_size=world_size, parts=parts)

    def rows_after(self, offset: int, *, rank: int, world_size: int) -> list[tuple[int, int]]:
        """Return how many rows of each of its shards a rank has from `offset` to the end of the epoch."""
        begin, until = self._rows_of_shards(offset), self._rows_of_shards(self.rows)
        first, last = shard_range(self.layout.shards, rank=rank, world_size=world_size)
        return [
            (source * self.layout.shards + shard, rows)
            for shard in range(first, last)
            for source, rows in enumerate(
                (self._counts(shard, int(until[shard])) - self._counts(shard, int(begin[shard]))).tolist()
            )
            if rows
        ]

    def _rows_of_shards(self, offset: int) -> npt.NDArray[np.int64]:
        """Return the row of each shard that comes next at an offset in the epoch."""
        return self._first + self._frame.consumed(np.arange(self.layout.shards), offset)

    def _reads(
        self,
        begin_rows: npt.NDArray[np.int64],
        end_rows: npt.NDArray[np.int64],
        *,
        rank: int,
        world_size: int,
        parts: Sequence[int | None],
    ) -> Iterator[Read]:
        """Yield the reads of one rank, from a row of each shard to before another one, in the order of need."""
        layout, shards = self.layout, self.layout.shards
        own = np.arange(*shard_range(shards, rank=rank, world_size=world_size))
        begin, until = np.zeros_like(layout.lengths), np.zeros_like(layout.lengths)
        for shard in own.tolist():
            begin[:, shard] = self._counts(shard, int(begin_rows[shard]))
            until[:, shard] = self._counts(shard, int(end_rows[shard]))
        reads: dict[int, Iterator[Read]] = {}
        for source in range(len(begin)):
            part = parts[source] if parts else None
            of_shards = self._reads_by_shard(source, own, begin[source], until[source], part)
            reads |= {source * shards + shard: each for shard, each in of_shards.items()}
        # A read comes when a shard takes its first row. An estimate of this place from the weights may be too late by
        # 1 / weight rows, and all that the other sources give in the meantime would be held.
        row, end = begin_rows[own], end_rows[own]
        taken, arrived = begin.reshape(-1), begin.reshape(-1).copy()
        size = max(_ROWS_AT_A_TIME, _MOST_ROWS_AT_A_TIME // max(1, len(own)))
        while (row < end).any():
            rows = row + np.arange(size)[:, None]
            within = rows < end
            shard_of = np.broadcast_to(own, rows.shape)[within]
            keys = self._sources(shard_of, rows[within]) * shards + shard_of
            counts = np.bincount(keys, minlength=arrived.size)
            row, before, taken = np.minimum(row + size, end), taken, taken + counts
            lacking = np.flatnonzero(taken > arrived)
            if not len(lacking):
                row, taken = self._skip(own, row, end, taken, arrived)
                continue
            order, firsts = np.argsort(keys, kind="stable"), np.cumsum(counts) - counts  # of the rows of each key
            needs = list(zip(order[(firsts + arrived - before)[lacking]].tolist(), lacking.tolist(), strict=True))
            heapq.heapify(needs)
            while needs:
                need, key = needs[0]
                held = int(arrived[key] - before[key])
                if held >= counts[key]:
                    heapq.heappop(needs)
                elif need < (later := int(order[firsts[key] + held])):
                    heapq.heapreplace(needs, (later, key))
                else:
                    read = next(reads[key])
                    for each in read.slices:
                        arrived[each.shard] += each.stop - each.start
                    yield read

    def _skip(
        self,
        own: npt.NDArray[np.int64],
        row: npt.NDArray[np.int64],
        end: npt.NDArray[np.int64],
        taken: npt.NDArray[np.int64],
        arrived: npt.NDArray[np.int64],
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return `row` and `taken` many rows later if all of these rows have arrived, and as they are otherwise."""
        starts = [*self.layout.interleave.starts, self.layout.mixed if self.layout.on_end == "drop" else _ENDLESS]
        first = int(row.max())
        phase = bisect_right(self.layout.interleave.starts, first) - 1
        shares = np.diff(np.array(self.layout.interleave.edges[phase], dtype=np.float64)) / 2.0**64
        left = (arrived - taken).reshape(len(shares), -1)[:, own].min(axis=1)
        given = shares > 0
        rows = min(int(((left[given] - _DISCREPANCY) / shares[given]).min()), starts[phase + 1] - first)
        while rows > _ROWS_TO_SKIP * len(shares):
            later = np.minimum(row + rows, end)
            counts = np.zeros_like(self.layout.lengths)
            for shard, at in zip(own.tolist(), later.tolist(), strict=True):
                counts[:, shard] = self._counts(shard, at)
            if (counts.reshape(-1) <= arrived).all():
                return later, counts.reshape(-1)
            rows //= 2
        return row, taken

    def batches(
        self,
        *,
        rank: int,
        world_size: int,
        global_batch_size: int,
        micro_batch_size: int | None = None,
        by_shard: bool = False,
        offset: int = 0,
    ) -> Iterator[Batch]:
        """Yield one rank's part of every global batch from `offset` on; the same number on every rank.

        A shard's rows of a batch come source by source, because few long pieces are copied faster than many short ones.
        """
        shards, sources = self.layout.shards, len(self.layout.lengths)
        row = self._first + self._frame.consumed(np.arange(shards), offset)
        frames = self._frame.batches(
            rank=rank,
            world_size=world_size,
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            by_shard=by_shard,
            offset=offset,
        )
        for batch, same in groupby(frames):
            taken = np.zeros(shards, dtype=np.int64)
            for each, count in batch.shard_counts:
                taken[each] = count
            shard = np.repeat(np.arange(shards), taken)
            within = np.arange(len(shard)) - (np.cumsum(taken) - taken)[shard]
            while times := sum(1 for _ in islice(same, _BATCHES_AT_A_TIME)):
                number = np.arange(times)[:, None]
                rows = row[shard] + within + number * taken[shard]
                source = self._sources(np.tile(shard, times), rows.reshape(-1)).reshape(times, -1)
                places = (number * shards + shard) * sources + source
                counts = np.bincount(places.reshape(-1), minlength=times * shards * sources).reshape(times, -1)
                for own in counts:
                    place = np.flatnonzero(own)
                    keys = place % sources * shards + place // sources
                    yield batch._replace(shard_counts=tuple(zip(keys.tolist(), own[place].tolist(), strict=True)))
                row += times * taken

    def locate(self, offset: int, count: int) -> list[tuple[int, int]]:
        """Return (fragment, row in the fragment, in file order) of the next samples, at most `count`."""
        return self._locate(*self._frame.next_samples(offset, count))

    def locate_on_rank(self, offset: int, count: int, *, rank: int, world_size: int) -> list[tuple[int, int]]:
        """Return the same for one rank's part of these samples, in the order of its batch."""
        first, last = shard_range(self.layout.shards, rank=rank, world_size=world_size)
        samples, shard = self._frame.next_samples(offset, count)
        order = np.lexsort((self._sources(shard, self._first + samples // self.layout.shards), shard))
        own = order[(shard[order] >= first) & (shard[order] < last)]
        return self._locate(samples[own], shard[own])

    @cached_property
    def _frame(self) -> EpochPlan:
        """Return the plan of the positions of the epoch, whatever their sources."""
        shards = self.layout.shards
        common, extra = divmod(self.rows, shards)
        bounds = np.cumsum([0, *(common + (np.arange(shards) < extra))])
        return EpochPlan(np.array([self.rows]), self.seed, self.epoch, shards=shards, tail=self.tail, bounds=bounds)

    @property
    def _first(self) -> int:
        """Return the first row of each shard."""
        return self.epoch * (self.rows // self.layout.shards) if self.continues else 0

    def _passes(self, source: int, shard: int, row: int) -> tuple[int, int]:
        """Return the pass of a row of a source's shard, and the row in it."""
        if self.layout.on_end != "repeat":
            return self.epoch, row
        done, within = divmod(row, int(self.layout.lengths[source, shard]))
        return done, within

    def _pass(self, source: int, number: int) -> EpochPlan:
        layout = self.layout
        return EpochPlan(
            layout.fragment_rows[source],
            self.seed + (source << 64),  # sources of equal sizes do not share an order
            number,
            shards=layout.shards,
            shuffle=self.shuffle,
            tail="keep",
            bounds=np.cumsum([0, *layout.lengths[source]]),
        )

    def _reads_by_shard(
        self,
        source: int,
        own: npt.NDArray[np.int64],
        begin: npt.NDArray[np.int64],
        until: npt.NDArray[np.int64],
        part: int | None,
    ) -> dict[int, Iterator[Read]]:
        """Return the reads of each of these shards of a source, from row `begin` to row `until`.

        Shards that have reads in common share an iterator.
        """
        own = own[begin[own] < until[own]]
        lengths = self.layout.lengths[source]
        if self.layout.on_end != "repeat" or len(np.unique(lengths[own])) < 2:
            return dict.fromkeys(own.tolist(), self._source_reads(source, own, begin, until, part))
        # A pass takes longer in the shards with one more row. In the end its rows for these shards would come whole
        # passes before they are needed, so the passes of the others are then read for themselves.
        shortest = int(lengths[own].min())
        together = np.minimum(until, shortest * lengths)
        common = self._source_reads(source, own[begin[own] < together[own]], begin, together, part)
        reads: dict[int, Iterator[Read]] = {}
        for length in (shortest, shortest + 1):
            group = own[lengths[own] == length]
            alone = self._source_reads(source, group, np.maximum(begin, together), until, part)
            reads |= dict.fromkeys(group.tolist(), chain(common, alone))
        return reads

    def _source_reads(
        self,
        source: int,
        own: npt.NDArray[np.int64],
        begin: npt.NDArray[np.int64],
        until: npt.NDArray[np.int64],
        part: int | None,
    ) -> Iterator[Read]:
        """Yield the reads of these shards of a source, from row `begin` of each to row `until`."""
        lengths, shards = self.layout.lengths[source], self.layout.shards
        before = sum(len(each) for each in self.layout.fragment_rows[:source])
        own = own[begin[own] < until[own]]
        if not len(own):
            return
        passes = range(
            min(self._passes(source, shard, int(begin[shard]))[0] for shard in own.tolist()),
            max(self._passes(source, shard, int(until[shard]) - 1)[0] for shard in own.tolist()) + 1,
        )
        first, last = int(own[0]), int(own[-1]) + 1
        end = np.zeros_like(until)
        end[own] = until[own]
        for number in passes:
            done = number * lengths if self.layout.on_end == "repeat" else np.zeros_like(lengths)
            reads: Iterable[Read] = self._pass(source, number).reads_between(
                first, last, np.clip(begin - done, 0, lengths), np.clip(end - done, 0, lengths)
            )
            if part is not None:
                # The windows of the sources begin at places that are spread evenly.
                reads = split_reads(reads, shards=shards, part=part, shift=part * source // len(self.layout.lengths))
            for read in reads:
                slices = tuple(each._replace(shard=source * shards + each.shard) for each in read.slices)
                yield Read(before + read.fragment, slices, read.order)

    def _counts(self, shard: int, row: int) -> npt.NDArray[np.int64]:
        """Return how many of a shard's first `row` rows come from each source."""
        layout = self.layout
        if layout.on_end != "drop" or row <= layout.mixed:
            return layout.interleave.counts(shard, row)
        mixed = layout.interleave.counts(shard, layout.mixed)
        left = layout.lengths[:, shard] - mixed
        counts: npt.NDArray[np.int64] = mixed + np.clip(row - layout.mixed - (np.cumsum(left) - left), 0, left)
        return counts

    def _sources(self, shard: npt.NDArray[np.int64], row: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the source of each of these rows of these shards."""
        layout = self.layout
        sources = layout.interleave.sources(shard, row)
        if layout.on_end == "drop":
            after = row >= layout.mixed
            for at in np.unique(shard[after]).tolist():
                left = layout.lengths[:, at] - layout.interleave.counts(at, layout.mixed)
                own = after & (shard == at)
                sources[own] = np.searchsorted(np.cumsum(left), row[own] - layout.mixed, side="right")
        return sources

    def _locate(self, samples: npt.NDArray[np.int64], shard: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
        row = self._first + samples // self.layout.shards
        found: list[tuple[int, int]] = [(-1, -1)] * len(samples)
        wanted: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        places = zip(self._sources(shard, row).tolist(), shard.tolist(), row.tolist(), strict=True)
        for index, (source, of, at) in enumerate(places):
            number, within = self._passes(source, of, int(self._counts(of, at)[source]))
            wanted.setdefault((source, number), []).append((index, of, within))
        for (source, number), rows in wanted.items():
            before = sum(len(each) for each in self.layout.fragment_rows[:source])
            index, of, within = np.array(rows).T
            located = self._pass(source, number).locate_rows(of, within)
            for at, (fragment, where) in zip(index.tolist(), located, strict=True):
                found[at] = before + fragment, where
        return found
