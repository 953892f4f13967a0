"""A thread that stays a few batches ahead of the training loop, across the ends of epochs."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, groupby, islice
from typing import Any, Literal, Protocol, TypeAlias

import torch

from .arrow import Rows
from .batching import GlobalBatch, ShardBuffers
from .engines import read_with_ray, read_with_threads
from .errors import DataError
from .plan import Batch, EpochPlan, Read, Slice, Tail
from .row_groups import ReadJob, read
from .sources import Source
from .transforms import Transform

# Batches are made a few at a time, which is cheaper, as long as these are small.
_MOST_AT_A_TIME = 16
_BYTES_AT_A_TIME = 2 * 2**20
# Rows that have been read and wait to be needed, at most.
_BYTES_AHEAD = 256 * 2**20
# Such helpings that lie ready. Two hide the jitter of one; more would only take memory.
_READY = 2


class StreamContext(Protocol):
    """What a stream must know of the run; `headway.trainer.data.protocols.Feed` has this shape."""

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
    """All that the batches of one rank depend on.

    Attributes:
        context: the run.
        source: the files.
        global_batch_size, shards, shuffle, tail: the plan; see `EpochPlan`.
        transforms: applied to the rows in this order.
        readers: reading tasks that run at a time.
        engine: what carries them out.
    """

    context: StreamContext
    source: Source
    global_batch_size: int
    shards: int
    shuffle: bool
    tail: Tail
    transforms: tuple[Transform, ...]
    readers: int
    engine: Literal["ray", "threads"]

    def plan(self, epoch: int) -> EpochPlan:
        """The order of one epoch."""
        return EpochPlan(
            self.source.fragment_rows,
            self.context.seed,
            epoch,
            shards=self.shards,
            shuffle=self.shuffle,
            tail=self.tail,
        )

    def reads(self, epoch: int, offset: int) -> Iterator[Read]:
        """What this rank reads of an epoch; nothing that only the tail would need."""
        plan = self.plan(epoch)
        end = plan.samples(self.global_batch_size, offset=offset)
        for each in plan.reads(rank=self.context.rank, world_size=self.context.world_size, offset=offset):
            if each.slices[0].first_need < end:
                yield each

    def job(self, epoch: int, fragment: int, slices: Sequence[Slice]) -> ReadJob:
        """What a reader must know to read these slices."""
        source = self.source
        file = source.files[source.fragment_files[fragment]]
        return ReadJob(
            path=file.path,
            digest=file.digest,
            group=int(source.fragment_groups[fragment]),
            num_rows=int(source.fragment_rows[fragment]),
            columns=tuple(source.columns),
            order=(self.context.seed, epoch, fragment) if self.shuffle else None,
            ranges=tuple((each.start, each.stop) for each in slices),
        )

    def filler_row(self) -> Rows:
        """One row to fill a micro-batch with, for a rank that has none of its own."""
        return read(self.job(0, 0, [Slice(0, 0, 1, 0)]), self.transforms)

    def row_names(self, places: Iterable[tuple[int, int]]) -> list[str]:
        """What rows are called that a plan gives by fragment and row in it: "<file>[<row group>]:<row in it>"."""
        files, groups = self.source.fragment_files, self.source.fragment_groups
        return [f"{self.source.files[files[each]].name}[{groups[each]}]:{row}" for each, row in places]

    def own_rows(self, epoch: int, offset: int, count: int) -> list[str]:
        """What this rank's part of some samples is called, in the order of its batch."""
        rank, world_size = self.context.rank, self.context.world_size
        return self.row_names(self.plan(epoch).locate_on_rank(offset, count, rank=rank, world_size=world_size))

    def rows(self, epochs: Iterable[Iterable[ReadJob]]) -> Generator[Rows, None, None]:
        """Carries the jobs out; the rows come in their order."""
        if self.engine == "ray":
            return read_with_ray(
                epochs,
                transforms=self.transforms,
                readers=self.readers,
                ahead_rows=self.ahead_rows,
                row_bytes=self.source.row_bytes,
            )
        return read_with_threads(epochs, transforms=self.transforms, readers=self.readers, ahead_rows=self.ahead_rows)

    @property
    def ahead_rows(self) -> int:
        """Rows to read ahead: a row group for each of the rank's shards, which is what an epoch begins with."""
        shards = -(-self.shards // self.context.world_size)
        wave = min(shards * int(self.source.fragment_rows.mean()), self.source.rows // self.context.world_size)
        return min(wave, _BYTES_AHEAD // self.source.row_bytes)


class Prefetcher:
    """The batches of one rank from a place in an epoch on, made ready by a thread.

    Training goes on into the next epoch, so that its first rows are there when it begins; evaluation is one epoch.

    Attributes:
        next_place: (epoch, offset) of the batch that comes next.
    """

    def __init__(self, spec: StreamSpec, epoch: int, offset: int) -> None:
        self.next_place = epoch, offset
        self._spec = spec
        self._ready: queue.Queue[_Item] = queue.Queue(maxsize=_READY)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headway-batches", daemon=True)
        self._thread.start()

    def epoch(self) -> Iterator[GlobalBatch]:
        """Yields what is left of the current epoch."""
        epoch, offset = self.next_place
        while (item := self._ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            batches, copied = item
            if copied is not None:
                _wait_for_copy(batches, copied)
            for batch in batches:
                offset += batch.global_num_samples
                self.next_place = epoch, offset
                yield batch
        self.next_place = epoch + 1, 0

    def close(self) -> None:
        """Ends the thread and all reading."""
        self._closed.set()
        while self._thread.is_alive():
            while not self._ready.empty():
                self._ready.get()
            self._thread.join(timeout=0.02)
        while not self._ready.empty():
            self._ready.get()
        # Nobody puts anything there any more: who still reads would wait for ever.
        self._ready.put(DataError("the stream was closed, or opened again, while somebody read from it"))

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
        spec, context = self._spec, self._spec.context
        epoch, offset = self.next_place
        asked: deque[Read] = deque()

        def epochs() -> Iterable[int]:
            return count(epoch) if context.training else (epoch,)

        def jobs(of: int) -> Iterator[ReadJob]:
            for one in spec.reads(of, offset if of == epoch else 0):
                asked.append(one)
                yield spec.job(of, one.fragment, one.slices)

        cuda = context.device.type == "cuda"
        copies = torch.cuda.Stream(context.device) if cuda else None  # type: ignore[no-untyped-call]
        with closing(spec.rows(map(jobs, epochs()))) as rows:
            buffers = ShardBuffers(asked, rows, spec.filler_row)
            for each in epochs():
                place = offset if each == epoch else 0
                batches = spec.plan(each).batches(
                    rank=context.rank,
                    world_size=context.world_size,
                    global_batch_size=spec.global_batch_size,
                    micro_batch_size=context.micro_batch_size,
                    by_shard=context.by_shard,
                    offset=place,
                )
                for batch, times in group_equal_batches(batches, spec.source.row_bytes):
                    size = batch.global_num_samples
                    names = [partial(spec.own_rows, each, place + i * size, size) for i in range(times)]
                    place += times * size
                    made = buffers.batches(batch, names, pinned=cuda)
                    yield (made, None) if copies is None else _copy_to_device(made, context.device, copies)
                buffers.clear()
                yield None


_Item: TypeAlias = tuple[list[GlobalBatch], "torch.cuda.Event | None"] | BaseException | None
"""Batches and the event of their copy to the device; what went wrong; or the end of an epoch."""


def group_equal_batches(batches: Iterable[Batch], row_bytes: int) -> Iterator[tuple[Batch, int]]:
    """Groups batches that take equally many rows of every shard, as almost all of an epoch do."""
    for batch, same in groupby(batches):
        most = max(1, min(_MOST_AT_A_TIME, _BYTES_AT_A_TIME // (row_bytes * max(1, sum(batch.sizes)))))
        while times := sum(1 for _ in islice(same, most)):
            yield batch, times


def _copy_to_device(batches: list[GlobalBatch], device: torch.device, stream: torch.cuda.Stream) -> _Item:
    """Starts to copy batches to the device, beside what the device computes meanwhile."""
    with torch.cuda.stream(stream):
        moved = [replace(batch, micro_batches=[_to(each, device) for each in batch.micro_batches]) for batch in batches]
    return moved, stream.record_event()


def _to(columns: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {
        name: each.to(device, non_blocking=True) if isinstance(each, torch.Tensor) else each
        for name, each in columns.items()
    }


def _wait_for_copy(batches: list[GlobalBatch], copied: torch.cuda.Event) -> None:
    """Lets the current stream wait for the copy; the host does not."""
    current = torch.cuda.current_stream()
    current.wait_event(copied)
    for columns in (columns for batch in batches for columns in batch.micro_batches):
        for each in columns.values():
            if isinstance(each, torch.Tensor):
                # The memory belongs to the copying stream, which must not reuse it while this one still reads it.
                each.record_stream(current)
