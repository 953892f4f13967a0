"""A torch DataLoader over a map-style dataset as an exact `BatchStream`.

The order of the rows is a pure function of (seed, epoch), so a run can resume at any position in an epoch without
reading the rows before it, on any number of ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
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

from ..checkpoints.rng import preserve_rng, seed_torch
from ..errors import DataError
from ..private_torch import shut_down_workers
from .protocols import GlobalBatch, Guarantee, LoadedBatch, ShardInfo

_MOST_ROWS = 16
_SETTINGS = (bool, int, float, str, type(None))


class LoaderStream:
    """Reads a map-style DataLoader in a seeded order that can resume at any position of an epoch.

    The loader's dataset, collate function, worker processes, batch size, `drop_last` and whether it shuffles are kept.
    Its sampler is replaced, and the rows are divided among the ranks. With worker processes, the global generators of
    Python, NumPy and torch are seeded by (seed, epoch, row) before each row, so augmentation does not depend on the
    number of workers, ranks or restarts. `get_worker_info().seed`, for a generator that the dataset owns, depends on
    the run's seed, the rank and the epoch in which the worker starts; resuming does not restore such a generator.
    """

    guarantee: Guarantee = "exact"

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._dataset: Any = loader.dataset
        assert isinstance(loader.batch_sampler, BatchSampler)  # that of the loader itself, or one of the user
        self._sampler = loader.batch_sampler
        rows = self._sampler.sampler
        self._shuffle = not isinstance(rows, SequentialSampler) and getattr(rows, "shuffle", True)
        self._indices = _Indices()
        self._reader: DataLoader[Any] | None = None
        self._batches: Iterator[Any] | None = None
        self._settings: list[dict[str, Any]] = []
        self._permutation: tuple[tuple[int, int], torch.Tensor] | None = None

    @property
    def fingerprint(self) -> str:
        """The class and length of the dataset, and its own `fingerprint` if it has one.

        Anything more would require reading it. The private `_fingerprint` of Hugging Face's datasets is not used:
        after a transformation that cannot be pickled, or without their cache, it differs in every process.
        """
        what = f"{type(self._dataset).__qualname__}[{len(self._dataset)}]"
        own = getattr(self._dataset, "fingerprint", None)
        return f"{what} {own}" if isinstance(own, str) else what

    def setup(self, shard: ShardInfo) -> None:
        """Compute the batch sizes.

        Raises:
            DataError: the training dataset is empty, or with `drop_last` smaller than one global batch. An evaluation
                skips an empty dataset.
        """
        self._shard = shard
        self._micro_batch_size = shard.micro_batch_size or self._sampler.batch_size
        own = self._sampler.batch_size * shard.world_size * (shard.accumulation if shard.training else 1)
        self._global_batch_size = ((shard.training or shard.by_shard) and shard.global_batch_size) or own
        self._drop_last = self._sampler.drop_last and shard.training
        if shard.training and not len(self._dataset):
            raise DataError(f"the {type(self._dataset).__name__} of the training loader has no rows")
        if self._drop_last and len(self._dataset) < self._global_batch_size:
            raise DataError(
                f"the {type(self._dataset).__name__} has {len(self._dataset)} rows, fewer than one global batch of "
                f"{self._global_batch_size}, and drop_last drops them: lower the batch size, or set drop_last=False"
            )

    def datasets(self) -> Iterator[Any]:
        """Yield the dataset and those inside, as in a `Subset` or a `ConcatDataset`."""
        return _parts_of(self._dataset)

    def samples_in_epoch(self, epoch: int) -> int:
        """Return the rows of an epoch over all ranks."""
        return self._epoch_end(0)

    def dropped_in_epoch(self, epoch: int, *, offset: int = 0) -> int:
        """Return how many rows `drop_last` leaves out; shuffling leaves out different ones in each epoch."""
        return len(self._dataset) - self._epoch_end(offset)

    def steps_in_epoch(self, epoch: int) -> int:
        """Return the global batches of an epoch; the last one may be smaller."""
        return ceil_div(self.samples_in_epoch(epoch), self._global_batch_size)

    @property
    def num_shards(self) -> int:
        """Logical shards: parts of a global batch of `micro_batch_size` rows each."""
        return ceil_div(self._global_batch_size, self._micro_batch_size)

    @property
    def draws_random_numbers(self) -> bool:
        """Whether rows are read in this process, where they may use its random generators."""
        return not self._loader.num_workers

    @property
    def micro_batch_size(self) -> int:
        """Maximum rows of one forward pass: as the config says, or else of a batch of the loader."""
        return self._micro_batch_size

    @property
    def samples_per_step(self) -> int:
        """Rows of one update over all ranks."""
        return self._global_batch_size

    def next_rows(self, epoch: int, *, offset: int, count: int) -> list[int]:
        """Return the dataset indices of the next rows over all ranks."""
        return self._order(epoch)[offset : min(offset + count, self._epoch_end(offset))].tolist()

    def epoch(self, epoch: int, *, offset: int = 0) -> Iterator[GlobalBatch]:
        """Yield the global batches from `offset` on; seeking costs only the epoch's permutation."""
        # Lists hold only the rows that the reader has prefetched, never the whole epoch.
        plan, ahead = tee(self._split(rows) for rows in self._global_rows(epoch, offset))
        rows = (rows for micro_batches, _, _ in ahead for rows in micro_batches)
        # Worker processes may outlive an epoch, so each row carries its epoch.
        self._indices.batches = ([(epoch, row) for row in each] for each in rows) if self._seeds_rows else rows
        if self._shard.training:
            for part in _parts_of(self._dataset):
                if (set_epoch := getattr(part, "set_epoch", None)) is not None:
                    set_epoch(epoch)
        reader = self._reader_for(epoch)
        self._batches = batches = iter(reader)
        try:
            for micro_batches, num_samples, total in plan:
                with preserve_rng() if self._seeds_this_process else nullcontext():
                    loaded = [_read(batches, rows, epoch) for rows in micro_batches]
                yield LoadedBatch(loaded, num_samples, total, micro_batches)
        finally:
            if not reader.persistent_workers:
                shut_down_workers(batches)

    def close(self) -> None:
        """Shut down the worker processes."""
        shut_down_workers(self._batches)
        self._batches = self._reader = None

    def _epoch_end(self, offset: int) -> int:
        """Return the end of the epoch if batches are cut from `offset` on; earlier ones may have had another size."""
        rows = len(self._dataset)
        return rows - (rows - offset) % self._global_batch_size if self._drop_last else rows

    def _global_rows(self, epoch: int, offset: int) -> Iterator[list[int]]:
        order, end = self._order(epoch), self._epoch_end(offset)
        for start in range(offset, end, self._global_batch_size):
            yield order[start : min(start + self._global_batch_size, end)].tolist()

    def _order(self, epoch: int) -> torch.Tensor:
        rows = len(self._dataset)
        if not self._shuffle or not self._shard.training:
            return torch.arange(rows)
        # Kept for the epoch: every save asks for the next rows, and a permutation of 20 million takes seconds.
        key = self._shard.seed, epoch
        if self._permutation is None or self._permutation[0] != key:
            self._permutation = key, torch.randperm(rows, generator=_generator(*key))
        return self._permutation[1]

    @property
    def _seeds_this_process(self) -> bool:
        """Whether rows are read in this process and seeded as in worker processes."""
        return self._shard.by_shard and not self._loader.num_workers

    @property
    def _seeds_rows(self) -> bool:
        return self._shard.by_shard or self._loader.num_workers > 0

    def _split(self, rows: list[int]) -> tuple[list[list[int]], list[int], int]:
        """Split the rows of a global batch into this rank's micro-batches; every rank gets the same number of them."""
        rank, size, length = self._shard.rank, self._shard.world_size, self._micro_batch_size
        if self._shard.by_shard:
            first, last = self.num_shards * rank // size, self.num_shards * (rank + 1) // size
            own = [rows[shard * length : (shard + 1) * length] for shard in range(first, last)]
        else:
            of_rank = _nth_part(rows, rank, size)
            num_micro_batches = max(1, ceil_div(ceil_div(len(rows), size), length))
            own = [_nth_part(of_rank, i, num_micro_batches) for i in range(num_micro_batches)]
        # An empty micro-batch reads one row that does not count: its rank must join every collective of the pass.
        return [each or rows[:1] for each in own], [len(each) for each in own], len(rows)

    def _reader_for(self, epoch: int) -> DataLoader[Any]:
        """Return the loader that reads; workers that start now are seeded by run, epoch and rank."""
        # Without a generator, every start of an epoch draws from the global one, so a resume would draw once more.
        generator = _generator(self._shard.seed, epoch, self._shard.rank)
        settings = [_settings_of(part) for part in _parts_of(self._dataset)]
        if settings != self._settings:
            # Persistent workers hold the dataset as it was when they started.
            self.close()
            self._settings = settings
        if self._reader is None:
            loader = self._loader
            workers: dict[str, Any] = {}
            if loader.num_workers:
                workers = {
                    "prefetch_factor": loader.prefetch_factor,
                    "persistent_workers": loader.persistent_workers,
                    "multiprocessing_context": loader.multiprocessing_context,
                    "worker_init_fn": partial(_init_worker, loader.worker_init_fn),
                    "timeout": loader.timeout,
                }
            self._reader = DataLoader(
                _SeededRows(self._dataset, self._shard.seed) if self._seeds_rows else self._dataset,
                batch_sampler=self._indices,
                collate_fn=loader.collate_fn,
                num_workers=loader.num_workers,
                # Copies from other memory would wait for the device.
                pin_memory=loader.pin_memory or self._shard.device.type == "cuda",
                **workers,
            )
        self._reader.generator = generator
        return self._reader


def _parts_of(dataset: Any) -> Iterator[Any]:
    """Yield a dataset and those inside, as in a `Subset` or a `ConcatDataset`."""
    yield dataset
    inside = (getattr(dataset, "dataset", None), *(getattr(dataset, "datasets", None) or ()))
    for part in inside:
        if isinstance(part, Dataset):
            yield from _parts_of(part)


def _settings_of(dataset: Any) -> dict[str, Any]:
    """Return the attributes that are numbers, text or None, such as the epoch or the difficulty of a curriculum."""
    return {name: value for name, value in getattr(dataset, "__dict__", {}).items() if isinstance(value, _SETTINGS)}


class _Indices:
    """A batch sampler whose batches are set before every epoch, so that worker processes can persist."""

    batches: Iterator[list[Any]] = iter(())

    def __iter__(self) -> Iterator[list[Any]]:
        return self.batches


class _SeededRows(Dataset[Any]):
    """A dataset that seeds all global generators before each row, so that its random numbers depend only on the row.

    For worker processes; the training process must restore its generators afterwards.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        # `Dataset.__getitem__`, which a dataset may inherit, only raises.
        self._has_rows = getattr(type(dataset), "__getitem__", Dataset.__getitem__) is not Dataset.__getitem__
        self._reads_at_once = hasattr(dataset, "__getitems__")

    def __getitems__(self, places: list[tuple[int, int]]) -> list[Any]:
        """Return several rows: at once if the dataset can and draws no random numbers, which depend on the row."""
        if self._reads_at_once:
            epoch, first = places[0]
            self._seed_row(epoch, first)
            before = _generator_states()
            rows: list[Any] = self._dataset.__getitems__([row for _, row in places])
            if before == _generator_states():
                return rows
            self._reads_at_once = False
        return [self[place] for place in places]

    def __getitem__(self, place: tuple[int, int]) -> Any:
        epoch, row = place
        self._seed_row(epoch, row)
        return self._dataset[row] if self._has_rows else self._dataset.__getitems__([row])[0]

    def _seed_row(self, epoch: int, row: int) -> None:
        words = np.random.SeedSequence((self._seed, epoch, row)).generate_state(2, np.uint32)
        seed_torch(int(words[0]))
        random.seed(int(words[1]))
        np.random.seed(words)

    def __len__(self) -> int:
        return len(self._dataset)


def _generator_states() -> tuple[Any, ...]:
    """Return the states of the global generators, which can be compared."""
    kind, keys, *rest = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), kind, np.asarray(keys).tobytes(), *rest


def _read(batches: Iterator[Any], rows: Sequence[int], epoch: int) -> Any:
    """Return the next batch; an error of the user's code names the rows."""
    try:
        return next(batches)
    except Exception as error:
        shown = ", ".join(map(str, rows[:_MOST_ROWS])) + (" ..." if rows[_MOST_ROWS:] else "")
        error.add_note(f"raised while a DataLoader read the rows {shown} of its dataset, in epoch {epoch}")
        raise


def _init_worker(init: Callable[[int], None] | None, worker: int) -> None:
    """Start a worker process: `get_worker_info` must show the loader's own dataset, not its `_SeededRows`."""
    info: Any = get_worker_info()
    # `WorkerInfo` forbids assignment. The process reads its rows through another reference.
    object.__setattr__(info, "dataset", info.dataset._dataset)
    if init is not None:
        init(worker)


def _generator(*key: int) -> torch.Generator:
    words = np.random.SeedSequence(key).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(words[0] >> np.uint64(1)))


def _nth_part(rows: list[int], n: int, parts: int) -> list[int]:
    return rows[len(rows) * n // parts : len(rows) * (n + 1) // parts]


def ceil_div(amount: int, divisor: int) -> int:
    """Return `amount / divisor`, rounded up."""
    return -(amount // -divisor)


def unsupported_part(loader: DataLoader[Any]) -> str | None:
    """Name the part of a loader that `LoaderStream` cannot replace: custom iteration, batching or sampling.

    Returns:
        None if the loader draws each row of a map-style dataset once.
    """
    if any(getattr(type(loader), name) is not getattr(DataLoader, name) for name in ("__iter__", "_get_iterator")):
        return f"its class, {type(loader).__name__}, which overrides the iteration of DataLoader"
    if isinstance(loader.dataset, IterableDataset):
        return f"its dataset, the IterableDataset {type(loader.dataset).__name__}"
    if loader.batch_sampler is None:
        return "batch_size=None"
    if type(loader.batch_sampler) is not BatchSampler:
        return f"its batch_sampler, a {type(loader.batch_sampler).__name__}"
    sampler: Any = loader.batch_sampler.sampler
    dataset: Any = loader.dataset
    # Not isinstance: a subclass may define another order.
    if type(sampler) not in (SequentialSampler, RandomSampler, DistributedSampler):
        return f"its sampler, a {type(sampler).__name__}"
    source: Any = sampler.dataset if isinstance(sampler, DistributedSampler) else sampler.data_source
    own_number = isinstance(sampler, RandomSampler) and (sampler.replacement or sampler.num_samples != len(source))
    if own_number or not (source is dataset or len(source) == len(dataset)):
        return f"its {type(sampler).__name__}, which does not draw each row of the dataset once"
    return None
