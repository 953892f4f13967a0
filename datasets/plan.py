"""Which rows come next: arithmetic only, the heart of exact resume. Knows no files, no Ray, no torch.

The order of an epoch is a pure function of (row counts, seed, epoch, shuffle, shards):

1. the fragments are permuted, the rows inside each fragment are permuted, and all rows are laid end to end;
2. that *sequence* of N rows is cut into S *logical shards*, shard s from N*s//S to N*(s+1)//S: equal, or one row apart;
3. the epoch's *samples* are drawn from the shards in turn: sample j is row j//S of shard j%S, and what the longer
   shards have over comes last, in the order of the shards.

The place in an epoch is one number, the *offset*: how many samples all ranks together have consumed. A global batch is
the next `global_batch_size` samples, so it takes `global_batch_size / S` rows of every shard, and which samples are
consumed depends on no batch size and no number of ranks. A rank owns a contiguous run of shards, and with it the same
rows at every step; nothing here is ever as long as an epoch, only as its list of fragments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import DataError

Tail = Literal["drop", "keep"]
USUAL_SHARDS = 32

# The first word of every seed: orders of different things never share a stream of random numbers.
_FRAGMENTS, _ROWS = 1, 2


class Slice(NamedTuple):
    """Consecutive rows of one logical shard that lie in one fragment.

    Attributes:
        shard: the logical shard.
        start, stop: places in the fragment's (permuted) row order.
        first_need: the sample of the epoch that takes the first of these rows.
    """

    shard: int
    start: int
    stop: int
    first_need: int


class Read(NamedTuple):
    """What is read of one fragment at one go: its slices, in this order."""

    fragment: int
    slices: tuple[Slice, ...]

    @property
    def rows(self) -> int:
        """Rows that come out of this read."""
        return sum(each.stop - each.start for each in self.slices)


class Batch(NamedTuple):
    """One rank's part of one global batch.

    Attributes:
        shard_counts: (shard, rows) in the order of the batch: the next rows of each of the rank's shards.
        sizes: rows of each micro-batch, equally many micro-batches on every rank; a size of 0 is filled with padding.
        global_num_samples: rows of the global batch over all ranks.
    """

    shard_counts: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]
    global_num_samples: int


def permutation(length: int, *key: int) -> npt.NDArray[np.int64]:
    """Returns an order of `length` things that depends on the key and nothing else, on every machine.

    The bits come from Philox, seeded through `SeedSequence`, whose streams NumPy promises never to change
    (https://numpy.org/doc/stable/reference/random/compatibility.html makes that promise for bit generators, not for
    `Generator.permutation`): the order is that of 64 random bits for each thing.
    """
    bits = np.random.Philox(np.random.SeedSequence(key)).random_raw(length)
    return np.argsort(bits, kind="stable")


def row_order(rows: int, *, seed: int, epoch: int, fragment: int, shuffle: bool) -> npt.NDArray[np.int64]:
    """Returns the order in which the rows of one fragment are laid into the epoch's sequence."""
    return permutation(rows, _ROWS, seed, epoch, fragment) if shuffle else np.arange(rows)


def default_shards(global_batch_size: int) -> int:
    """Returns the divisor of the global batch size that is nearest to 32, by ratio.

    32 is more ranks than most runs ever have, and draws each batch from 32 places of the data. As many row groups are
    open at a time, over all ranks, and each shard's end lets one be read twice: more shards mix better and cost more.
    It depends on nothing that changes with the machine.
    """
    small = [d for d in range(1, math.isqrt(global_batch_size) + 1) if global_batch_size % d == 0]
    divisors = {*small, *(global_batch_size // d for d in small)}
    return min(sorted(divisors), key=lambda d: abs(math.log(d / USUAL_SHARDS)))


def check_shards(shards: int, *, global_batch_size: int, world_size: int) -> None:
    """Refuses shards that cannot be dealt out.

    Raises:
        DataError: the global batch size is not a multiple of `shards`, or there are more ranks than shards.
    """
    if shards < 1:
        raise DataError(f"shards is a whole number from 1, not {shards}")
    if global_batch_size % shards:
        down = global_batch_size - global_batch_size % shards
        nearest = " or ".join(str(each) for each in (down, down + shards) if each)
        raise DataError(
            f"global_batch_size {global_batch_size} is not a multiple of the {shards} logical shards, each of "
            f"which gives equally many rows to every batch; nearest: {nearest}; or leave shards out, and "
            f"{default_shards(global_batch_size)} are used"
        )
    if world_size > shards:
        raise DataError(
            f"{world_size} ranks cannot share {shards} logical shards, each of which belongs to one rank; use at most "
            f"{shards} workers, or shards and a global_batch_size (now {global_batch_size}) of at least {world_size}"
        )


@dataclass(frozen=True)
class EpochPlan:
    """The order of one epoch.

    Attributes:
        fragment_rows: rows of every fragment, in the order of the source.
        seed, epoch: what the order depends on.
        shuffle: False keeps the order of the source.
        shards: logical shards, fixed for the run.
        tail: "keep" delivers every row exactly once; "drop" ends after the last full global batch.

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

    @property
    def rows(self) -> int:
        """Rows of the dataset."""
        return int(self.fragment_rows.sum())

    def samples(self, global_batch_size: int, *, offset: int = 0) -> int:
        """Where an epoch that goes on from `offset` ends: its samples, less what the tail policy drops."""
        return self.rows - (self.rows - offset) % global_batch_size if self.tail == "drop" else self.rows

    def steps(self, global_batch_size: int) -> int:
        """Global batches of the epoch, the last of which may be smaller under "keep"."""
        return -(-self.samples(global_batch_size) // global_batch_size)

    def reads(self, *, rank: int, world_size: int, offset: int = 0) -> list[Read]:
        """Returns what a rank reads from `offset` to the end of the sequence, in the order of first need.

        Takes time and memory for the rank's fragments, not for its rows. Under "drop" the last few rows are read for
        nothing, so that the list depends on no batch size.
        """
        first, last = shard_range(self.shards, rank=rank, world_size=world_size)
        cuts = self._shard_bounds
        order = permutation(len(self.fragment_rows), _FRAGMENTS, self.seed, self.epoch) if self.shuffle else None
        fragments = np.arange(len(self.fragment_rows)) if order is None else order
        ends = np.cumsum(self.fragment_rows[fragments])
        starts = ends - self.fragment_rows[fragments]

        # Every start of a fragment or of a shard begins a slice; what a shard has given before `offset` is left out.
        edges = np.unique(np.concatenate([starts, cuts[first : last + 1]]))
        edges = edges[(edges >= cuts[first]) & (edges <= cuts[last])]
        begin, end = edges[:-1], edges[1:]
        shard = np.searchsorted(cuts, begin, side="right") - 1
        begin = np.maximum(begin, cuts[shard] + self._consumed(shard, offset))
        keep = begin < end
        begin, end, shard = begin[keep], end[keep], shard[keep]
        place = np.searchsorted(ends, begin, side="right")
        first_need = self._sample(shard, begin - cuts[shard])
        last_need = self._sample(shard, end - 1 - cuts[shard])

        reads: list[list[int]] = []
        open_reads: dict[
            int, tuple[int, int]
        ] = {}  # place of a fragment: index in reads, last need of its slices there
        newest: dict[int, int] = {}  # shard: index in reads of its last slice
        for index in np.argsort(first_need, kind="stable").tolist():
            at, of = int(place[index]), int(shard[index])
            read, until = open_reads.get(at, (-1, -1))
            # A fragment longer than a shard is needed by several at once: it is read once for all of them, unless this
            # slice would then arrive before rows that its shard needs earlier.
            if int(first_need[index]) <= until and newest.get(of, -1) <= read:
                reads[read].append(index)
            else:
                read, until = len(reads), -1
                reads.append([index])
            open_reads[at] = read, max(until, int(last_need[index]))
            newest[of] = read
        return [
            Read(
                int(fragments[place[indices[0]]]),
                tuple(
                    Slice(
                        int(shard[i]),
                        int(begin[i] - starts[place[i]]),
                        int(end[i] - starts[place[i]]),
                        int(first_need[i]),
                    )
                    for i in indices
                ),
            )
            for indices in reads
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
        """Yields a rank's part of every global batch from `offset` on; equally many on every rank.

        With `by_shard` no micro-batch has rows of two shards: each shard's rows make equally many, which depends on no
        number of ranks.
        """
        first, last = shard_range(self.shards, rank=rank, world_size=world_size)
        shards = np.arange(self.shards)
        runs = np.array([shard_range(self.shards, rank=r, world_size=world_size)[0] for r in range(world_size)])
        end = self.samples(global_batch_size, offset=offset)
        cached: tuple[bytes, Batch] | None = None
        before = self._consumed(shards, offset)
        while offset < end:
            size = min(global_batch_size, end - offset)
            after = self._consumed(shards, offset + size)
            taken = after - before
            # Almost all batches of an epoch are alike.
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
        """Returns fragment and row in it (of the file, not of the permuted order) of the next samples, at most `count`.

        Takes the permutation of each fragment that it names.
        """
        return self._locate(*self._next_samples(offset, count))

    def locate_on_rank(self, offset: int, count: int, *, rank: int, world_size: int) -> list[tuple[int, int]]:
        """Returns the same of a rank's part of these samples, in the order that they have in its batch."""
        first, last = shard_range(self.shards, rank=rank, world_size=world_size)
        samples, shard = self._next_samples(offset, count)
        order = np.argsort(shard, kind="stable")
        own = order[(shard[order] >= first) & (shard[order] < last)]
        return self._locate(samples[own], shard[own])

    def _next_samples(self, offset: int, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The next samples, and the shard that each is drawn from."""
        samples = np.arange(offset, min(offset + count, self.rows))
        shard, over = samples % self.shards, samples - self.rows // self.shards * self.shards
        # What the longer shards have over comes last.
        longer = np.flatnonzero(np.diff(self._shard_bounds) > self.rows // self.shards)
        shard[over >= 0] = longer[over[over >= 0]]
        return samples, shard

    def _locate(self, samples: npt.NDArray[np.int64], shard: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
        """Fragment and row in it of samples that are drawn from these shards."""
        place = self._shard_bounds[shard] + samples // self.shards
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
            (fragment, int(orders[fragment][row]))
            for fragment, row in zip(fragments[at].tolist(), within.tolist(), strict=True)
        ]

    @property
    def _shard_bounds(self) -> npt.NDArray[np.int64]:
        return self.rows * np.arange(self.shards + 1, dtype=np.int64) // self.shards

    def _consumed(self, shard: npt.NDArray[np.int64], offset: int) -> npt.NDArray[np.int64]:
        """Rows that each of these shards has given to the first `offset` samples."""
        common = self.rows // self.shards
        if offset <= common * self.shards:
            return offset // self.shards + (shard < offset % self.shards)
        longer = np.cumsum(np.diff(self._shard_bounds) > common)
        return common + ((np.diff(self._shard_bounds) > common) & (longer <= offset - common * self.shards))[shard]

    def _sample(self, shard: npt.NDArray[np.int64], row: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The sample of the epoch that is row `row` of shard `shard`."""
        common = self.rows // self.shards
        longer = np.cumsum(np.diff(self._shard_bounds) > common)
        return np.where(row < common, row * self.shards + shard, common * self.shards + longer[shard] - 1)


def shard_range(shards: int, *, rank: int, world_size: int) -> tuple[int, int]:
    """Returns the first of a rank's logical shards, and the first that is not."""
    return shards * rank // world_size, shards * (rank + 1) // world_size


def split_evenly(total: int, parts: int) -> tuple[int, ...]:
    """Cuts `total` into whole numbers that differ by at most one."""
    return tuple(total * (i + 1) // parts - total * i // parts for i in range(parts))
