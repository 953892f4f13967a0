"""The order of the rows of an epoch, which makes exact resume possible. Pure arithmetic: no files, no Ray, no torch.

The order of an epoch is a pure function of (row counts, seed, epoch, shuffle, shards):

1. The fragments (row groups) are permuted, the rows inside each fragment are permuted, and all rows are concatenated.
2. This *sequence* of N rows is cut into S *logical shards*, shard s from N*s//S to N*(s+1)//S. Their lengths differ by
   at most one row.
3. The *samples* of the epoch are taken from the shards in round-robin order: sample j is row j//S of shard j%S. The one
   extra row of each longer shard comes last, in shard order.

The position in an epoch is one number, the *offset*: how many samples all ranks together have consumed. A global batch
is the next `global_batch_size` samples, so it takes `global_batch_size / S` rows of every shard. Which samples have
been consumed depends neither on the batch size nor on the number of ranks. Each rank owns a contiguous range of shards,
and therefore the same rows of every step. No array here is as long as an epoch, only as its list of fragments.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import DataError

Tail = Literal["drop", "keep"]
DEFAULT_SHARDS = 32

# The first word of every seed, so that the two kinds of order never share a stream of random numbers.
_FRAGMENTS, _ROWS = 1, 2


class Slice(NamedTuple):
    """Consecutive rows of one logical shard that lie in one fragment.

    Attributes:
        shard: the logical shard.
        start, stop: positions in the fragment's (permuted) row order.
        first_need: the sample of the epoch that uses the first of these rows.
    """

    shard: int
    start: int
    stop: int
    first_need: int


class Read(NamedTuple):
    """One read of a fragment.

    Attributes:
        fragment: index of the fragment in the source.
        slices: the rows to return, in this order.
        order: the key of the fragment's row order, (seed, epoch, fragment); None for the order of the source.
    """

    fragment: int
    slices: tuple[Slice, ...]
    order: tuple[int, int, int] | None

    @property
    def rows(self) -> int:
        """Number of rows that this read returns."""
        return sum(each.stop - each.start for each in self.slices)


class Batch(NamedTuple):
    """One rank's part of one global batch.

    Attributes:
        shard_counts: (shard, rows) in batch order: how many of the next rows to take from each of the rank's shards.
        sizes: rows of each micro-batch. Every rank has the same number of micro-batches; one of size 0 is padded.
        global_num_samples: rows of the global batch over all ranks.
    """

    shard_counts: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]
    global_num_samples: int


def permutation(length: int, *key: int) -> npt.NDArray[np.int64]:
    """Return a permutation of `range(length)` that depends only on the key, on every machine.

    Sorts by 64 random bits per item, drawn from Philox seeded through `SeedSequence`. NumPy guarantees that the streams
    of bit generators never change; it gives no such guarantee for `Generator.permutation`
    (https://numpy.org/doc/stable/reference/random/compatibility.html).
    """
    bits = np.random.Philox(np.random.SeedSequence(key)).random_raw(length)
    return np.argsort(bits, kind="stable")


def row_order(rows: int, *, seed: int, epoch: int, fragment: int, shuffle: bool) -> npt.NDArray[np.int64]:
    """Return the order of one fragment's rows in the epoch's sequence."""
    return permutation(rows, _ROWS, seed, epoch, fragment) if shuffle else np.arange(rows)


def default_shards(global_batch_size: int) -> int:
    """Return the divisor of the global batch size that is nearest to 32, by ratio.

    32 exceeds the ranks of most runs, and mixes rows of 32 places of the data into each batch. More shards mix better
    but cost more: one row group per shard is open at a time over all ranks, and the row group at the end of each shard
    may be read twice. The result depends on nothing that changes with the machine.
    """
    small = [d for d in range(1, math.isqrt(global_batch_size) + 1) if global_batch_size % d == 0]
    divisors = {*small, *(global_batch_size // d for d in small)}
    return min(sorted(divisors), key=lambda d: abs(math.log(d / DEFAULT_SHARDS)))


def check_shards(shards: int, *, global_batch_size: int, world_size: int) -> None:
    """Check that the shards can be distributed over the ranks.

    Raises:
        DataError: the global batch size is not a multiple of `shards`, or there are more ranks than shards.
    """
    if shards < 1:
        raise DataError(f"shards must be an integer >= 1, got {shards}")
    if global_batch_size % shards:
        down = global_batch_size - global_batch_size % shards
        nearest = " or ".join(str(each) for each in (down, down + shards) if each)
        raise DataError(
            f"global_batch_size {global_batch_size} is not a multiple of the {shards} logical shards. Nearest: "
            f"{nearest}. Or omit shards to use {default_shards(global_batch_size)}"
        )
    if world_size > shards:
        raise DataError(
            f"{world_size} ranks cannot share {shards} logical shards, because each shard belongs to one rank. Use at "
            f"most {shards} workers, or set shards and global_batch_size (now {global_batch_size}) to at least "
            f"{world_size}"
        )


@dataclass(frozen=True)
class EpochPlan:
    """The order of one epoch.

    Attributes:
        fragment_rows: int64, rows of each fragment, in the order of the source.
        seed, epoch: seed of the order.
        shuffle: False keeps the order of the source.
        shards: number of logical shards, fixed for the run.
        tail: "keep" yields every row exactly once; "drop" ends after the last full global batch.
        bounds: int64, where each logical shard begins, and where the last one ends; None for equal lengths. The lengths
            may differ by one.

    Example:
        >>> import numpy as np
        >>> from headway.datasets.plan import EpochPlan
        >>> plan = EpochPlan(np.array([60, 40]), seed=0, epoch=0, shards=4)
        >>> plan.rows, plan.steps(16), plan.samples(16)
        (100, 6, 96)
    """

    fragment_rows: npt.NDArray[np.int64]
    seed: int
    epoch: int
    shards: int
    shuffle: bool = True
    tail: Tail = "drop"
    bounds: npt.NDArray[np.int64] | None = None

    @property
    def rows(self) -> int:
        """Number of rows of the dataset."""
        return int(self.fragment_rows.sum())

    def samples(self, global_batch_size: int, *, offset: int = 0) -> int:
        """Return the offset at which an epoch resumed at `offset` ends, after the tail policy."""
        return self.rows - (self.rows - offset) % global_batch_size if self.tail == "drop" else self.rows

    def steps(self, global_batch_size: int) -> int:
        """Return the number of global batches of the epoch. With tail="keep" the last one may be smaller."""
        return -(-self.samples(global_batch_size) // global_batch_size)

    def reads(self, *, rank: int, world_size: int, offset: int = 0, end: int | None = None) -> list[Read]:
        """Return the reads of one rank from `offset` to the end of the epoch, in the order of first need.

        Time and memory are proportional to the rank's fragments, not to its rows. `end` leaves out the reads that only
        samples from there on need; without it, the list does not depend on the batch size.
        """
        shards = np.arange(self.shards)
        first, last = shard_range(self.shards, rank=rank, world_size=world_size)
        reads = self.reads_between(first, last, self.consumed(shards, offset), np.diff(self._shard_bounds))
        return reads if end is None else [each for each in reads if each.slices[0].first_need < end]

    def reads_between(
        self, first: int, last: int, consumed: npt.NDArray[np.int64], stop: npt.NDArray[np.int64]
    ) -> list[Read]:
        """Return the reads of the shards from `first` to before `last`, from row `consumed` of each to row `stop`."""
        cuts = self._shard_bounds
        order = permutation(len(self.fragment_rows), _FRAGMENTS, self.seed, self.epoch) if self.shuffle else None
        fragments = np.arange(len(self.fragment_rows)) if order is None else order
        ends = np.cumsum(self.fragment_rows[fragments])
        starts = ends - self.fragment_rows[fragments]

        # A slice begins at each start of a fragment or shard. Rows that were consumed before `offset` are skipped.
        edges = np.unique(np.concatenate([starts, cuts[first : last + 1]]))
        edges = edges[(edges >= cuts[first]) & (edges <= cuts[last])]
        begin, end = edges[:-1], edges[1:]
        shard = np.searchsorted(cuts, begin, side="right") - 1
        begin = np.maximum(begin, cuts[shard] + consumed[shard])
        end = np.minimum(end, cuts[shard] + stop[shard])
        keep = begin < end
        begin, end, shard = begin[keep], end[keep], shard[keep]
        place = np.searchsorted(ends, begin, side="right")
        first_need = self._sample_index(shard, begin - cuts[shard])
        last_need = self._sample_index(shard, end - 1 - cuts[shard])

        reads: list[list[int]] = []
        open_reads: dict[int, tuple[int, int]] = {}  # position of a fragment: (index in reads, last need of its slices)
        newest: dict[int, int] = {}  # shard: index in reads of its last slice
        for index in np.argsort(first_need, kind="stable").tolist():
            at, of = int(place[index]), int(shard[index])
            read, until = open_reads.get(at, (-1, -1))
            # A fragment longer than a shard is needed by several shards at a time. It is read once for all of them,
            # unless this slice would then arrive before rows that its shard needs earlier.
            if int(first_need[index]) <= until and newest.get(of, -1) <= read:
                reads[read].append(index)
            else:
                read, until = len(reads), -1
                reads.append([index])
            open_reads[at] = read, max(until, int(last_need[index]))
            newest[of] = read
        return [
            Read(
                fragment,
                tuple(
                    Slice(
                        int(shard[i]),
                        int(begin[i] - starts[place[i]]),
                        int(end[i] - starts[place[i]]),
                        int(first_need[i]),
                    )
                    for i in indices
                ),
                (self.seed, self.epoch, fragment) if self.shuffle else None,
            )
            for indices, fragment in ((each, int(fragments[place[each[0]]])) for each in reads)
        ]

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

        With `by_shard` no micro-batch mixes rows of two shards. Each shard then gives the same number of micro-batches,
        whatever the number of ranks.
        """
        first, last = shard_range(self.shards, rank=rank, world_size=world_size)
        shards = np.arange(self.shards)
        runs = np.array([shard_range(self.shards, rank=r, world_size=world_size)[0] for r in range(world_size)])
        end = self.samples(global_batch_size, offset=offset)
        cached: tuple[bytes, Batch] | None = None
        before = self.consumed(shards, offset)
        while offset < end:
            size = min(global_batch_size, end - offset)
            after = self.consumed(shards, offset + size)
            taken = after - before
            # Almost all batches of an epoch are equal.
            if cached is None or cached[0] != taken.tobytes():
                most = int(taken.max() if by_shard else np.add.reduceat(taken, runs).max())
                own = taken[first:last]
                num_micro_batches = max(1, -(-most // (micro_batch_size or most)))
                shard_counts = tuple((first + i, int(rows)) for i, rows in enumerate(own) if rows)
                cut = own.tolist() if by_shard else [int(own.sum())]
                sizes = tuple(each for rows in cut for each in split_evenly(rows, num_micro_batches))
                cached = taken.tobytes(), Batch(shard_counts, sizes, size)
            yield cached[1]
            offset, before = offset + size, after

    def locate(self, offset: int, count: int) -> list[tuple[int, int]]:
        """Return (fragment, row in the fragment, in file order) of the next samples, at most `count`.

        Computes the permutation of each fragment involved.
        """
        return self._locate(*self.next_samples(offset, count))

    def locate_on_rank(self, offset: int, count: int, *, rank: int, world_size: int) -> list[tuple[int, int]]:
        """Return the same for one rank's part of these samples, in the order of its batch."""
        first, last = shard_range(self.shards, rank=rank, world_size=world_size)
        samples, shard = self.next_samples(offset, count)
        order = np.argsort(shard, kind="stable")
        own = order[(shard[order] >= first) & (shard[order] < last)]
        return self._locate(samples[own], shard[own])

    def next_samples(self, offset: int, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the next samples and the shard of each."""
        samples = np.arange(offset, min(offset + count, self.rows))
        shard, over = samples % self.shards, samples - self.rows // self.shards * self.shards
        # The extra rows of the longer shards come last.
        longer = np.flatnonzero(np.diff(self._shard_bounds) > self.rows // self.shards)
        shard[over >= 0] = longer[over[over >= 0]]
        return samples, shard

    def _locate(self, samples: npt.NDArray[np.int64], shard: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
        """Return (fragment, row in the fragment) of samples that come from these shards."""
        return self.locate_rows(shard, samples // self.shards)

    def locate_rows(self, shard: npt.NDArray[np.int64], row: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
        """Return (fragment, row in the fragment) of rows of logical shards."""
        place = self._shard_bounds[shard] + row
        fragments = np.arange(len(self.fragment_rows))
        if self.shuffle:
            fragments = permutation(len(self.fragment_rows), _FRAGMENTS, self.seed, self.epoch)
        ends = np.cumsum(self.fragment_rows[fragments])
        at = np.searchsorted(ends, place, side="right")
        within = place - (ends - self.fragment_rows[fragments])[at]
        orders: dict[int, npt.NDArray[np.int64]] = {}
        for fragment in fragments[at].tolist():
            if fragment not in orders:
                orders[fragment] = row_order(
                    int(self.fragment_rows[fragment]),
                    seed=self.seed,
                    epoch=self.epoch,
                    fragment=fragment,
                    shuffle=self.shuffle,
                )
        return [
            (fragment, int(orders[fragment][at]))
            for fragment, at in zip(fragments[at].tolist(), within.tolist(), strict=True)
        ]

    @property
    def _shard_bounds(self) -> npt.NDArray[np.int64]:
        if self.bounds is not None:
            return self.bounds
        return self.rows * np.arange(self.shards + 1, dtype=np.int64) // self.shards

    def consumed(self, shard: npt.NDArray[np.int64], offset: int) -> npt.NDArray[np.int64]:
        """Return how many of the first `offset` samples come from each of these shards."""
        common = self.rows // self.shards
        if offset <= common * self.shards:
            return offset // self.shards + (shard < offset % self.shards)
        longer = np.cumsum(np.diff(self._shard_bounds) > common)
        return common + ((np.diff(self._shard_bounds) > common) & (longer <= offset - common * self.shards))[shard]

    def _sample_index(self, shard: npt.NDArray[np.int64], row: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the sample of the epoch that is row `row` of shard `shard`."""
        common = self.rows // self.shards
        longer = np.cumsum(np.diff(self._shard_bounds) > common)
        return np.where(row < common, row * self.shards + shard, common * self.shards + longer[shard] - 1)


def split_reads(reads: Iterable[Read], *, shards: int, part: int, shift: int) -> Iterator[Read]:
    """Yield the same rows by reads that return at most `part` rows of each shard.

    A fragment is then read again whenever its next rows are needed, instead of being held until its last row is used.
    Time is cut into windows of `part` rows of every shard, so a fragment that is needed by several shards at a time is
    still read once for all of them. The rows of each shard come in the same order as before.

    Args:
        reads: in the order of first need.
        shards: logical shards of the plan.
        part: rows of a window.
        shift: row of each shard at which a window begins, so that not all sources of a mixture are read at once.
    """
    waiting = iter(reads)
    following = next(waiting, None)
    unfinished: list[Read] = []
    end = 0
    while unfinished or following is not None:
        if not unfinished and following is not None:
            row = following.slices[0].first_need // shards
            end = (row + part - (row - shift) % part) * shards
        while following is not None and following.slices[0].first_need < end:
            unfinished.append(following)
            following = next(waiting, None)
        left = []
        for read in unfinished:
            now, later = [], []
            for each in read.slices:
                middle = min(each.stop, each.start + max(0, -(-(end - each.first_need) // shards)))
                if each.start < middle:
                    now.append(each._replace(stop=middle))
                if middle < each.stop:
                    need = each.first_need + (middle - each.start) * shards
                    later.append(each._replace(start=middle, first_need=need))
            if now:
                yield read._replace(slices=tuple(now))
            if later:
                left.append(read._replace(slices=tuple(later)))
        unfinished = left
        end += part * shards


def shard_range(shards: int, *, rank: int, world_size: int) -> tuple[int, int]:
    """Return the range [first, last) of a rank's logical shards."""
    return shards * rank // world_size, shards * (rank + 1) // world_size


def split_evenly(total: int, parts: int) -> tuple[int, ...]:
    """Split `total` into integers that differ by at most one."""
    return tuple(total * (i + 1) // parts - total * i // parts for i in range(parts))
