"""Turns what people have (a torch DataLoader, any iterable, a function that makes one) into a `BatchStream`.

A DataLoader over a map-style dataset becomes exact: its rows are drawn by our own order, a pure function of (seed,
epoch), so that any place in an epoch is found again at once and at any number of ranks. Anything else is read as it
comes, and says so by a weaker guarantee.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import tee
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    get_worker_info,
)

from ..checkpoints.rng import RngState, seed_torch
from ..errors import ConfigError, DataError
from .protocols import BatchStream, GlobalBatch, Guarantee, ShardInfo, is_stream
from .tree import batch_size


def as_stream(data: Any) -> BatchStream:
    """Returns the stream that reads `data`: a stream as it is, a DataLoader, an iterable, or a function that makes one.

    Raises:
        ConfigError: `data` is none of these.
    """
    if is_stream(data):
        return data
    if isinstance(data, DataLoader) and _reads_by(data) is None:
        return LoaderStream(data)
    if not isinstance(data, (str, bytes, Mapping)) and (isinstance(data, Iterable) or callable(data)):
        return IterableStream(data)
    raise ConfigError(
        f"cannot read batches from a {type(data).__name__}: give a torch DataLoader, a Headway stream, any iterable of "
        "batches, or a function that returns one"
    )


@dataclass(frozen=True, slots=True)
class LoadedBatch:
    """A `GlobalBatch` that a loader's batches make up, with the rows of each where they are known."""

    micro_batches: Sequence[Any]
    num_samples: Sequence[int]
    global_num_samples: int | None
    rows: Sequence[Sequence[int]] = ()

    def row_ids(self) -> Sequence[Sequence[int]]:
        """Returns the places of the rows in the loader's dataset."""
        return self.rows


class LoaderStream:
    """Reads a map-style DataLoader in an order of our own, so that every place of an epoch can be found again.

    The loader's dataset, collate function, worker processes, batch size, `drop_last` and whether it shuffles are kept;
    its sampler is replaced, and shared out over the ranks by us. With worker processes, what a row draws from the
    global generators of Python, NumPy and torch is seeded by (seed, epoch, row): augmentation does not depend on the
    number of workers, ranks or restarts. `get_worker_info().seed`, for a generator of the dataset's own, is one of the
    run's seed, the rank and the epoch in which the process begins; no resume puts such a generator back.
    """

    guarantee: Guarantee = "exact"

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._dataset: Any = loader.dataset
        self._shuffle = not isinstance(loader.sampler, SequentialSampler) and getattr(loader.sampler, "shuffle", True)
        self._indices = _Indices()
        self._reader: DataLoader[Any] | None = None
        self._batches: Iterator[Any] | None = None

    @property
    def fingerprint(self) -> str:
        """The kind and the length of the dataset, and its own `fingerprint` if it has one.

        That is all that can be told without reading it. The private one of Hugging Face's datasets is not it: after a
        transformation that cannot be pickled, or without their cache, it is another one in every process.
        """
        what = f"{type(self._dataset).__qualname__}[{len(self._dataset)}]"
        own = getattr(self._dataset, "fingerprint", None)
        return f"{what} {own}" if isinstance(own, str) else what

    def setup(self, shard: ShardInfo) -> None:
        """Works out the batch sizes.

        Raises:
            DataError: the dataset is empty, or smaller than one global batch whose tail is dropped, and is to be
                trained on; an evaluation leaves out what is empty.
        """
        loader, self._shard = self._loader, shard
        assert loader.batch_size is not None
        self._micro_batch_size = shard.micro_batch_size or loader.batch_size
        own = loader.batch_size * shard.world_size * (shard.accumulation if shard.training else 1)
        self._global_batch_size = ((shard.training or shard.by_shard) and shard.global_batch_size) or own
        self._drop_last = loader.drop_last and shard.training
        if shard.training and not len(self._dataset):
            raise DataError(f"the {type(self._dataset).__name__} of the training loader has no rows")
        if self._drop_last and len(self._dataset) < self._global_batch_size:
            raise DataError(
                f"the {type(self._dataset).__name__} has {len(self._dataset)} rows, less than one global batch of "
                f"{self._global_batch_size}, and drop_last drops it: nothing would be trained on"
            )

    def samples_in_epoch(self, epoch: int) -> int:
        """Rows of an epoch over all ranks."""
        return self._end(0)

    def dropped_in_epoch(self, epoch: int, *, offset: int = 0) -> int:
        """Rows that `drop_last` leaves out, others in every epoch if they are shuffled."""
        return len(self._dataset) - self._end(offset)

    def steps_in_epoch(self, epoch: int) -> int:
        """Global batches of an epoch, the last of which may be smaller."""
        return _ceil(self.samples_in_epoch(epoch), self._global_batch_size)

    @property
    def num_shards(self) -> int:
        """Logical shards: parts of a global batch of `micro_batch_size` rows each."""
        return _ceil(self._global_batch_size, self._micro_batch_size)

    def epoch(self, epoch: int, *, offset: int = 0) -> Iterator[GlobalBatch]:
        """Yields the global batches from `offset` on; finding it costs nothing but the epoch's permutation."""
        # The reader is ahead by what it prefetches; more of the epoch is never in lists.
        plan, ahead = tee(self._split(rows) for rows in self._global_rows(epoch, offset))
        rows = (rows for micro_batches, _, _ in ahead for rows in micro_batches)
        # Worker processes may outlive an epoch, so the epoch travels with each row.
        self._indices.batches = ([(epoch, row) for row in each] for each in rows) if self._seeds_rows else rows
        reader = self._read(epoch)
        self._batches = batches = iter(reader)
        try:
            for micro_batches, num_samples, total in plan:
                with _generators_kept() if self._seeds_here else nullcontext():
                    loaded = [next(batches) for _ in micro_batches]
                yield LoadedBatch(loaded, num_samples, total, micro_batches)
        finally:
            if not reader.persistent_workers:
                _end_workers(batches)

    def close(self) -> None:
        """Ends the worker processes."""
        _end_workers(self._batches)
        self._batches = self._reader = None

    @property
    def samples_per_step(self) -> int:
        """Rows of one update over all ranks."""
        return self._global_batch_size

    def next_rows(self, epoch: int, *, offset: int, count: int) -> list[int]:
        """Returns the places in the dataset of the rows that come next over all ranks."""
        return self._order(epoch)[offset : min(offset + count, self._end(offset))].tolist()

    def _end(self, offset: int) -> int:
        """Where an epoch that goes on from `offset` ends; other batches may have led there."""
        rows = len(self._dataset)
        return rows - (rows - offset) % self._global_batch_size if self._drop_last else rows

    def _global_rows(self, epoch: int, offset: int) -> Iterator[list[int]]:
        order, end = self._order(epoch), self._end(offset)
        for start in range(offset, end, self._global_batch_size):
            yield order[start : min(start + self._global_batch_size, end)].tolist()

    def _order(self, epoch: int) -> torch.Tensor:
        rows = len(self._dataset)
        if not self._shuffle or not self._shard.training:
            return torch.arange(rows)
        return torch.randperm(rows, generator=_generator(self._shard.seed, epoch))

    @property
    def _seeds_here(self) -> bool:
        """Whether rows are read in this process, by random numbers of their own all the same."""
        return self._shard.by_shard and not self._loader.num_workers

    @property
    def _seeds_rows(self) -> bool:
        return self._shard.by_shard or self._loader.num_workers > 0

    def _split(self, rows: list[int]) -> tuple[list[list[int]], list[int], int]:
        """Cuts the rows of a global batch into this rank's micro-batches; every rank gets equally many of them."""
        rank, size, length = self._shard.rank, self._shard.world_size, self._micro_batch_size
        if self._shard.by_shard:
            first, last = self.num_shards * rank // size, self.num_shards * (rank + 1) // size
            parts = [rows[shard * length : (shard + 1) * length] for shard in range(first, last)]
            return [part or rows[:1] for part in parts], [len(part) for part in parts], len(rows)
        own = rows[len(rows) * rank // size : len(rows) * (rank + 1) // size]
        num_micro_batches = max(1, _ceil(_ceil(len(rows), size), self._micro_batch_size))
        pieces = [
            own[len(own) * i // num_micro_batches : len(own) * (i + 1) // num_micro_batches]
            for i in range(num_micro_batches)
        ]
        # A rank without rows still takes part in every collective of the forward pass; its row counts nothing.
        return [piece or rows[:1] for piece in pieces], [len(piece) for piece in pieces], len(rows)

    def _read(self, epoch: int) -> DataLoader[Any]:
        """Returns the loader that reads, whose workers, if they begin now, are seeded by run, epoch and rank."""
        # Without a generator, every start of an epoch draws from the global one, and a resumed run draws once more.
        generator = _generator(self._shard.seed, epoch, self._shard.rank)
        if self._reader is None:
            loader = self._loader
            workers: dict[str, Any] = {}
            if loader.num_workers:
                workers = {
                    "prefetch_factor": loader.prefetch_factor,
                    "persistent_workers": loader.persistent_workers,
                    "multiprocessing_context": loader.multiprocessing_context,
                    "worker_init_fn": partial(_begin_worker, loader.worker_init_fn),
                    "timeout": loader.timeout,
                }
            self._reader = DataLoader(
                _SeededRows(self._dataset, self._shard.seed) if self._seeds_rows else self._dataset,
                batch_sampler=self._indices,
                collate_fn=loader.collate_fn,
                num_workers=loader.num_workers,
                pin_memory=loader.pin_memory,
                **workers,
            )
        self._reader.generator = generator
        return self._reader


class IterableStream:
    """Reads any iterable as it comes: every rank what its own iterable gives, several batches to one update.

    An iterable that can be started again (a list, a DataLoader over an `IterableDataset`, a function that makes an
    iterator) guarantees whole epochs: after an interruption the epoch begins again. A generator guarantees nothing.
    """

    def __init__(self, data: Iterable[Any] | Callable[[], Iterable[Any]]) -> None:
        self._make: Callable[[], Iterable[Any]] = data if not isinstance(data, Iterable) else lambda: data
        self._data = data
        self._once = isinstance(data, Iterator)
        self._batches: Iterator[Any] | None = None
        self._given: Any = None
        self._loader: DataLoader[Any] | None = None
        self._epoch: int | None = None
        self._num_batches = _length(data)

    @property
    def guarantee(self) -> Guarantee:
        """Nothing ("none") for an iterator that runs once, otherwise "epoch"."""
        return "none" if self._once else "epoch"

    @property
    def fingerprint(self) -> None:
        """Nobody can tell what an iterable holds without reading it."""
        return

    def setup(self, shard: ShardInfo) -> None:
        """Takes note of the accumulation.

        Raises:
            ConfigError: a global batch size is asked for, which only a stream that knows its rows can keep.
            DataError: the iterable has no batches, and is to be trained on.
        """
        self._shard = shard
        if shard.training and shard.global_batch_size is not None:
            own = _reads_by(self._data) if isinstance(self._data, DataLoader) else None
            why = f"This one is read as it comes, because of {own}, and" if own else "An iterable"
            raise ConfigError(
                f"global_batch_size={shard.global_batch_size} needs data that can be cut to size: a DataLoader over a "
                "map-style dataset, with no sampler but torch's sequential, random and distributed ones, or a Headway "
                f"stream. {why} brings its own batches; set gradient_accumulation_steps instead"
            )
        if shard.training and self._num_batches == 0:
            raise DataError(f"the training data, a {type(self._data).__name__}, has no batches")
        if shard.rank == 0 and shard.world_size > 1:
            self._warn_of_ranks()

    def samples_in_epoch(self, epoch: int) -> None:
        """Not known before the batches are read."""
        return

    def steps_in_epoch(self, epoch: int) -> int | None:
        """Global batches, where the iterable has a length."""
        return None if self._num_batches is None else _ceil(self._num_batches, self._window)

    def epoch(self, epoch: int, *, offset: int = 0) -> Iterator[GlobalBatch]:
        """Yields groups of batches from the beginning of the iterable, or from where a generator stands."""
        made = self._own(self._make())
        stays = isinstance(made, DataLoader) and made.persistent_workers
        if _tell_epoch(made, epoch) and epoch != self._epoch:
            # Worker processes that stay have a dataset of the epoch before.
            self._end_workers()
        self._epoch = epoch
        window: list[Any] = []
        length = self._window
        self._batches = batches = iter(made)
        try:
            for batch in batches:
                window.append(batch)
                if len(window) == length:
                    yield self._group(window)
                    window = []
            if window:
                yield self._group(window)
        finally:
            if not stays:
                _end_workers(batches)

    def close(self) -> None:
        """Ends the worker processes of a loader; the next epoch begins others."""
        self._end_workers()

    def _own(self, made: Iterable[Any]) -> Iterable[Any]:
        """Takes a loader whose workers stay for this stream alone: it has one iterator, and others may read it too."""
        if not isinstance(made, DataLoader) or not made.persistent_workers:
            return made
        if self._loader is None or made is not self._given:
            self._given, self._loader = made, copy.copy(made)
            self._loader._iterator = None
        return self._loader

    def _warn_of_ranks(self) -> None:
        """Says that a loader whose rows could have been shared out is not."""
        data, shard = self._data, self._shard
        if not isinstance(data, DataLoader) or isinstance(data.dataset, IterableDataset) or _knows_ranks(data):
            return
        warnings.warn(
            f"each of the {shard.world_size} ranks reads all that the {_role(shard)} loader gives, and each row "
            f"{'is trained on' if shard.training else 'counts'} as often: the loader is read as it comes, because of "
            f"{_reads_by(data)}. Let it take the part of self.world.rank, or give a DataLoader without that",
            stacklevel=2,
        )

    def _end_workers(self) -> None:
        _end_workers(self._batches)
        if self._loader is not None:
            # Those that were to stay for the next epoch: a loader whose workers have ended does not know it.
            _end_workers(self._loader._iterator)
            self._loader._iterator = None
        self._batches = None

    @property
    def _window(self) -> int:
        return self._shard.accumulation if self._shard.training else 1

    def _group(self, window: list[Any]) -> LoadedBatch:
        num_samples = [batch_size(batch) for batch in window]
        return LoadedBatch(window, num_samples, sum(num_samples) if self._shard.world_size == 1 else None)


class _Indices:
    """A batch sampler whose batches are set before every epoch, so that a loader's worker processes can stay."""

    batches: Iterator[list[Any]] = iter(())

    def __iter__(self) -> Iterator[list[Any]]:
        return self.batches


def _generator(*key: int) -> torch.Generator:
    """Seeds a generator by some numbers."""
    words = np.random.SeedSequence(key).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(words[0] >> np.uint64(1)))


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Leaves the generators of this process as they were, whatever happens to them inside."""
    generators = RngState()
    before = generators.state_dict()
    try:
        yield
    finally:
        generators.load_state_dict(before)


class _SeededRows(Dataset[Any]):
    """Seeds everything random of its process before each row: what a row draws depends on nothing but the row.

    In another process than that of the training, unless the generators are put back afterwards.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        # What torch gives a dataset without a method of its own raises.
        self._has_rows = getattr(type(dataset), "__getitem__", Dataset.__getitem__) is not Dataset.__getitem__

    def __getitem__(self, place: tuple[int, int]) -> Any:
        epoch, row = place
        words = np.random.SeedSequence((self._seed, epoch, row)).generate_state(2, np.uint32)
        seed_torch(int(words[0]))
        random.seed(int(words[1]))
        np.random.seed(words)
        return self._dataset[row] if self._has_rows else self._dataset.__getitems__([row])[0]

    def __len__(self) -> int:
        return len(self._dataset)


def _begin_worker(init: Callable[[int], None] | None, worker: int) -> None:
    """Begins a worker process, where `get_worker_info` gives the loader's own dataset, and not what seeds its rows."""
    info: Any = get_worker_info()
    # Frozen for everybody else; the process reads its rows through what it holds itself.
    object.__setattr__(info, "dataset", info.dataset._dataset)
    if init is not None:
        init(worker)


def _end_workers(batches: Iterator[Any] | None) -> None:
    """Ends the worker processes behind an iterator of a DataLoader, if there are any.

    They would end with the iterator itself, but the traceback of an error in a row keeps it alive.
    """
    if (shut_down := getattr(batches, "_shutdown_workers", None)) is not None:
        shut_down()


def _tell_epoch(data: Any, epoch: int) -> bool:
    """Tells every part of a loader that asks for it which epoch begins; returns whether its dataset does."""
    batch_sampler, dataset = getattr(data, "batch_sampler", None), getattr(data, "dataset", None)
    parts = (data, getattr(data, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None), dataset)
    for part in {id(part): part for part in parts}.values():  # a batch sampler has mostly the loader's own sampler
        if (set_epoch := getattr(part, "set_epoch", None)) is not None:
            set_epoch(epoch)
    return hasattr(dataset, "set_epoch")


def _reads_by(loader: DataLoader[Any]) -> str | None:
    """Names what of a loader has a way of its own to read; None if it draws all rows of a map-style dataset once.

    That is what our own order does, which then takes its place.
    """
    if any(getattr(type(loader), name) is not getattr(DataLoader, name) for name in ("__iter__", "_get_iterator")):
        return f"its class, {type(loader).__name__}, which overrides how a DataLoader iterates"
    if isinstance(loader.dataset, IterableDataset):
        return f"its dataset, the IterableDataset {type(loader.dataset).__name__}"
    if loader.batch_sampler is None:
        return "batch_size=None"
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        return f"its batch_sampler, a {type(loader.batch_sampler).__name__}"
    sampler: Any = loader.sampler
    dataset: Any = loader.dataset
    # A class derived from one of these may have an order of its own.
    if type(sampler) not in (SequentialSampler, RandomSampler, DistributedSampler):
        return f"its sampler, a {type(sampler).__name__}"
    source: Any = sampler.dataset if isinstance(sampler, DistributedSampler) else sampler.data_source
    own_number = isinstance(sampler, RandomSampler) and (sampler.replacement or sampler.num_samples != len(source))
    if own_number or not (source is dataset or len(source) == len(dataset)):
        return f"its {type(sampler).__name__}, which does not draw each row of the dataset once"
    return None


def _knows_ranks(loader: DataLoader[Any]) -> bool:
    """Whether a sampler of a loader gives each rank its part."""
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    return any(hasattr(each, name) for each in samplers for name in ("num_replicas", "rank", "process_index"))


def _ceil(amount: int, divisor: int) -> int:
    return -(amount // -divisor)


def _length(data: Any) -> int | None:
    """Counts the batches, where that is known: a DataLoader asks its sampler, which may not know, or guesses."""
    if not isinstance(data, Sized) or (isinstance(data, DataLoader) and isinstance(data.dataset, IterableDataset)):
        return None
    try:
        return len(data)
    except TypeError:
        return None


def _role(shard: ShardInfo) -> str:
    return "training" if shard.training else "validation"
