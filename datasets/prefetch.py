"""Prefetches batches in a thread, across the ends of epochs, and copies them to the device."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, count, groupby, islice
from typing import Any, Literal, Protocol, TypeAlias

import torch

from .arrow import Rows
from .batching.memory_limits import RowLimit, limit_rows
from .batching.micro_batches import GlobalBatch
from .batching.shard_buffers import ShardBuffers
from .batching.spill import SpillError, spill_folder
from .engines import read_with_ray, read_with_threads
from .errors import DataError
from .formats.base import RowSource
from .formats.token_budget import rows_are_batches
from .mixture import MixedSource
from .mixture_plan import MixturePlan
from .plan import Batch, EpochPlan, Read, Tail, split_reads
from .row_groups import ReadJob, read
from .transforms import Transform

logger = logging.getLogger("headway.datasets")

# Small batches are made several at a time, which is cheaper.
_MOST_AT_A_TIME = 16
_BYTES_AT_A_TIME = 16 * 2**20
# Rows that have been read but are not needed yet, at most.
_BYTES_AHEAD = 256 * 2**20
# Groups of batches kept ready. Two hide the jitter of one; more only take memory.
_READY = 2


class ShardInfo(Protocol):
    """Which part of the data a rank reads, and how. Implemented by the trainer's class of the same name."""

    @property
    def rank(self) -> int: ...  # noqa: D102
    @property
    def world_size(self) -> int: ...  # noqa: D102
    @property
    def global_batch_size(self) -> int | None: ...  # noqa: D102
    @property
    def micro_batch_size(self) -> int | None: ...  # noqa: D102
    @property
    def seed(self) -> int: ...  # noqa: D102
    @property
    def device(self) -> torch.device: ...  # noqa: D102
    @property
    def training(self) -> bool: ...  # noqa: D102
    @property
    def by_shard(self) -> bool: ...  # noqa: D102


@dataclass(frozen=True)
class StreamSpec:
    """Everything that the batches of one rank depend on.

    Attributes:
        shard: rank, seed, batch size and device of the run.
        source: the opened dataset.
        global_batch_size, shards, shuffle, tail: see `EpochPlan`.
        transforms: applied to the rows in this order.
        readers: concurrent reading tasks.
        reader_cpus: CPUs of data nodes to reserve for each reading task on Ray.
        engine: what runs the reading tasks.
        spills: rows may wait in temporary files, instead of being read again.
    """

    shard: ShardInfo
    source: RowSource
    global_batch_size: int
    shards: int
    shuffle: bool
    tail: Tail
    transforms: tuple[Transform, ...]
    readers: int
    reader_cpus: float
    engine: Literal["ray", "threads"]
    spills: bool = True

    def plan(self, epoch: int) -> EpochPlan | MixturePlan:
        """Return the order of one epoch. An evaluation reads each row of a mixture once, one source after the other."""
        if isinstance(self.source, MixedSource) and self.shard.training:
            return self.source.plan(self.shard.seed, epoch, shuffle=self.shuffle, tail=self.tail)
        return EpochPlan(
            self.source.fragment_rows,
            self.shard.seed,
            epoch,
            shards=self.shards,
            shuffle=self.shuffle,
            tail=self.tail,
        )

    def reads(self, epoch: int, offset: int) -> Iterable[Read]:
        """Return this rank's reads of an epoch, without those that only the dropped tail needs."""
        plan = self.plan(epoch)
        end = plan.samples(self.global_batch_size, offset=offset)
        rank, world_size = self.shard.rank, self.shard.world_size
        parts = [each.per_read for each in self.row_limits]
        if isinstance(plan, MixturePlan):
            return plan.reads(rank=rank, world_size=world_size, offset=offset, end=end, parts=parts)
        reads = plan.reads(rank=rank, world_size=world_size, offset=offset, end=end)
        (part,) = parts
        return reads if part is None else split_reads(reads, shards=self.shards, part=part, shift=0)

    def reads_on(self, epoch: int, offset: int) -> Iterator[Iterable[Read]]:
        """Return this rank's reads of an epoch from `offset` on and, in a training, of each epoch after it."""
        plan = self.plan(epoch)
        if isinstance(plan, MixturePlan) and plan.continues:
            parts = [each.per_read for each in self.row_limits]
            rank, world_size = self.shard.rank, self.shard.world_size
            reads = plan.endless_reads(rank=rank, world_size=world_size, offset=offset, parts=parts)
            return _cut(reads, plan.rows // world_size)  # about an epoch, whose last read may reach into the next one
        following = count(epoch + 1) if self.shard.training else ()
        return chain([self.reads(epoch, offset)], (self.reads(each, 0) for each in following))

    def job(self, read: Read) -> ReadJob:
        """Return the job of a read."""
        ranges = tuple((each.start, each.stop) for each in read.slices)
        return ReadJob(self.source.fragment(read.fragment), read.order, ranges)

    def filler_row(self) -> Rows:
        """Return one row, to fill a micro-batch of a rank that has no rows."""
        return read(ReadJob(self.source.fragment(0), None, ((0, 1),)), self.transforms)

    def row_names(self, places: Iterable[tuple[int, int]]) -> list[str]:
        """Return the ids of rows given as (fragment, row in the fragment)."""
        return [self.source.row_name(fragment, row) for fragment, row in places]

    def own_rows(self, epoch: int, offset: int, count: int) -> list[str]:
        """Return the ids of this rank's part of some samples, in the order of its batch."""
        rank, world_size = self.shard.rank, self.shard.world_size
        return self.row_names(self.plan(epoch).locate_on_rank(offset, count, rank=rank, world_size=world_size))

    def rows(self, epochs: Iterable[Iterable[ReadJob]]) -> Generator[Rows, None, None]:
        """Run the jobs and yield their rows in order."""
        if self.engine == "ray":
            return read_with_ray(
                epochs,
                transforms=self.transforms,
                readers=self.readers,
                ahead_rows=self.ahead_rows,
                row_bytes=self.source.row_bytes,
                cpus=self.reader_cpus,
                log_placement=self.shard.rank == 0 and self.shard.training,
            )
        return read_with_threads(epochs, transforms=self.transforms, readers=self.readers, ahead_rows=self.ahead_rows)

    @property
    def mixed(self) -> list[RowSource]:
        """The sources that each batch mixes."""
        if isinstance(self.source, MixedSource) and self.shard.training:
            return list(self.source.sources.values())
        return [self.source]

    @cached_property
    def row_limits(self) -> list[RowLimit]:
        """How many rows of each of these sources are held in memory."""
        return limit_rows(self.mixed, shards=self.shards, world_size=self.shard.world_size, spills=self.spills)

    @property
    def ahead_rows(self) -> int:
        """Rows to read ahead: one read for each shard of the rank and source, which the start of an epoch needs."""
        # An epoch starts with half of a limited read, on average. Reads of rows that wait on disk are whole, and few.
        wave = sum(
            -(-(limit.per_read or (limit.in_memory or 0) // 2) // 2) or int(source.fragment_rows.mean())
            for source, limit in zip(self.mixed, self.row_limits, strict=True)
        )
        wave *= -(-self.shards // self.shard.world_size)
        return min(wave, self.source.rows // self.shard.world_size, _BYTES_AHEAD // self.source.row_bytes)


def _cut(reads: Iterable[Read], rows: int) -> Iterator[Iterable[Read]]:
    """Cut endless reads into stretches of about so many rows."""
    total = 0

    def stretch(read: Read) -> int:
        nonlocal total
        total += read.rows
        return (total - read.rows) // rows

    return (same for _, same in groupby(reads, stretch))


class Prefetcher:
    """The batches of one rank from a position in an epoch on, prepared by a thread.

    Training continues into the next epoch, so that its first rows are ready when it begins. Evaluation is one epoch.

    Attributes:
        next_position: (epoch, offset) of the next batch.
    """

    def __init__(self, spec: StreamSpec, epoch: int, offset: int) -> None:
        self.next_position = epoch, offset
        self._spec = spec
        self._ready: queue.Queue[_Item] = queue.Queue(maxsize=_READY)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headway-batches", daemon=True)
        self._thread.start()

    def epoch(self) -> Iterator[GlobalBatch]:
        """Yield the remaining batches of the current epoch."""
        epoch, offset = self.next_position
        while (item := self._ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            batches, copied = item
            if copied is not None:
                _wait_for_copy(batches, copied)
            for batch in batches:
                offset += batch.global_num_samples
                self.next_position = epoch, offset
                yield batch
        self.next_position = epoch + 1, 0

    def close(self) -> None:
        """Stop the thread and all reading."""
        self._closed.set()
        while self._thread.is_alive():
            while not self._ready.empty():
                self._ready.get()
            self._thread.join(timeout=0.02)
        while not self._ready.empty():
            self._ready.get()
        # The thread has ended, so a consumer that is still reading would block forever.
        self._ready.put(DataError("the stream was closed, or opened again, while an iterator was reading from it"))

    def _run(self) -> None:
        try:
            for item in self._items():
                if not self._put(item):
                    return
        except BaseException as error:
            self._put(error)

    def _put(self, item: _Item) -> bool:
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False

    def _items(self) -> Iterator[_Item]:
        self._next_item = self.next_position
        try:
            yield from self._items_of(self._spec)
            return
        except SpillError as error:
            logger.warning(
                "rows that are needed later cannot be kept in %s (%s), so row groups are read again for each part of "
                "their rows, which is slower. Free some of its disk, or set TMPDIR to a folder on another one",
                spill_folder(),
                str(error),  # a kept record of the log would otherwise keep the files open, by the traceback
            )
        self._spec = replace(self._spec, spills=False)
        yield from self._items_of(self._spec)

    def _items_of(self, spec: StreamSpec) -> Iterator[_Item]:
        """Yield the items from `_next_item` on, which it moves on."""
        shard = spec.shard
        epoch, offset = self._next_item
        asked: deque[Read] = deque()

        def epochs() -> Iterable[int]:
            return count(epoch) if shard.training else (epoch,)

        def jobs(reads: Iterable[Read]) -> Iterator[ReadJob]:
            for one in reads:
                asked.append(one)
                yield spec.job(one)

        cuda = shard.device.type == "cuda"
        copies = torch.cuda.Stream(shard.device) if cuda else None  # type: ignore[no-untyped-call]
        with closing(spec.rows(map(jobs, spec.reads_on(epoch, offset)))) as rows:
            buffers = ShardBuffers(
                *(asked, rows, spec.filler_row),
                same_types=isinstance(spec.source, MixedSource),
                rows_are_batches=rows_are_batches(spec.source),
                in_memory=lambda shard: spec.row_limits[shard // spec.shards].in_memory,
            )
            for each in epochs():
                place = offset if each == epoch else 0
                plan = spec.plan(each)
                batches = plan.batches(
                    rank=shard.rank,
                    world_size=shard.world_size,
                    global_batch_size=spec.global_batch_size,
                    micro_batch_size=shard.micro_batch_size,
                    by_shard=shard.by_shard,
                    offset=place,
                )
                for some in group_batches(batches, spec.source.row_bytes):
                    names = []
                    for batch in some:
                        names.append(partial(spec.own_rows, each, place, batch.global_num_samples))
                        place += batch.global_num_samples
                    made = buffers.batches(some, names, pin_memory=cuda)
                    self._next_item = each, place
                    yield (made, None) if copies is None else _copy_to_device(made, shard.device, copies)
                self._next_item = each + 1, 0
                yield None
                if isinstance(plan, MixturePlan) and plan.continues:
                    buffers.skip(plan.rows_after(place, rank=shard.rank, world_size=shard.world_size))
                else:
                    buffers.clear()


_Item: TypeAlias = tuple[list[GlobalBatch], "torch.cuda.Event | None"] | BaseException | None
"""Batches with the event of their copy to the device; or an error; or None at the end of an epoch."""


def group_batches(batches: Iterable[Batch], row_bytes: int) -> Iterator[list[Batch]]:
    """Yield lists of consecutive batches that are made together. Those without rows of this rank are apart."""
    for own, same in groupby(batches, key=lambda each: sum(each.sizes)):
        most = max(1, min(_MOST_AT_A_TIME, _BYTES_AT_A_TIME // (row_bytes * max(1, own))))
        while some := list(islice(same, most)):
            yield some


def _copy_to_device(batches: list[GlobalBatch], device: torch.device, stream: torch.cuda.Stream) -> _Item:
    """Start copying batches to the device on a side stream, in parallel with computation."""
    with torch.cuda.stream(stream):
        moved = [replace(batch, micro_batches=[_to(each, device) for each in batch.micro_batches]) for batch in batches]
    return moved, stream.record_event()


def _to(columns: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {
        name: each.to(device, non_blocking=True) if isinstance(each, torch.Tensor) else each
        for name, each in columns.items()
    }


def _wait_for_copy(batches: list[GlobalBatch], copied: torch.cuda.Event) -> None:
    """Make the current stream wait for the copy, without blocking the host."""
    current = torch.cuda.current_stream()
    current.wait_event(copied)
    for columns in (columns for batch in batches for columns in batch.micro_batches):
        for each in columns.values():
            if isinstance(each, torch.Tensor):
                # Allocated on the copying stream, which must not reuse the memory while this stream reads it.
                each.record_stream(current)
