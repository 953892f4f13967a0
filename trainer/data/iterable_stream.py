"""Any iterable as a `BatchStream`: read in its own order, with a weaker guarantee than "exact"."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, NoReturn

from torch.utils.data import DataLoader, IterableDataset

from ..checkpoints.rng import preserve_rng, seed_for
from ..errors import ConfigError, DataError
from ..private_torch import forget_iterator, shut_down_workers
from .dataloader_stream import ceil_div, unsupported_part
from .iterator_state import IteratorState, has_iterator_state
from .protocols import GlobalBatch, Guarantee, LoadedBatch, ShardInfo, Stateful
from .repeats import WorkerRepeats
from .tree import batch_size

_PREPARED = {
    "accelerate": "return the DataLoader without accelerator.prepare(), as Headway divides its rows over the ranks",
    "ray": (
        "return the DataLoader without prepare_data_loader(), as Headway divides its rows over the ranks, or, for a "
        "dataset of Ray Data, RayDataset(dataset), of headway.datasets.formats.ray_dataset, without "
        "iter_torch_batches()"
    ),
}
"""What to return in place of data that a package has prepared for its ranks, by the name of the package."""


class IterableStream:
    """Reads any iterable in its own order: each rank reads its own iterable, several batches per update.

    An iterable that can be restarted (a list, a DataLoader over an `IterableDataset`, a function that returns an
    iterator) guarantees "epoch": after an interruption its epoch restarts. An iterator guarantees "none".

    Data with a `state_dict` guarantees "state": checkpoints have the state of each rank, and as many ranks resume where
    it says. See `state_of`.
    """

    def __init__(self, data: Iterable[Any] | Callable[[], Iterable[Any]]) -> None:
        self._is_iterator = isinstance(data, Iterator)
        self._num_batches = _length(data)
        self._name = type(data).__name__
        read = IteratorState(data) if isinstance(data, Iterable) and has_iterator_state(data) else data
        self._make: Callable[[], Iterable[Any]] = read if not isinstance(read, Iterable) else lambda: read
        self._data = read
        self._batches: Iterator[Any] | None = None
        self._copied_from: Any = None
        self._loader: DataLoader[Any] | None = None
        self._epoch: int | None = None
        self._position: _RankPosition | None = None

    @property
    def guarantee(self) -> Guarantee:
        """Return "state" if the data has one, "epoch" if it can be restarted, "none" if it is an iterator."""
        if state_of(self._data) is not None:
            return "state"
        return "none" if self._is_iterator else "epoch"

    @property
    def rank_state(self) -> Stateful | None:
        """The position of this rank in data with a state; None for other data, and for evaluation data."""
        return self._position

    @property
    def rank_state_before_read(self) -> Stateful | None:
        """The position of this rank without the batch that is being read, or was read last."""
        return None if self._position is None else self._position.before_read()

    def return_to_before_read(self) -> None:
        """Continue at that position in the next epoch that is opened, if the data has a state."""
        if self._position is not None:
            self._position.load_state_dict(self._position.before_read().state_dict())

    @property
    def is_restored(self) -> bool:
        """Whether a loaded position was saved on the same number of ranks."""
        return self._position is not None and self._position.is_restored

    @property
    def fingerprint(self) -> None:
        """Return None: the content is unknown before it is read."""
        return

    def setup(self, shard: ShardInfo) -> None:
        """Store `shard`, and check that the iterable supports it.

        Raises:
            ConfigError: a global batch size is set, which needs a stream that knows its rows.
            DataError: the iterable is training data and has no batches.
        """
        self._shard = shard
        self._repeats = WorkerRepeats(self._data, "training" if shard.training else "validation")
        if shard.training and shard.global_batch_size is not None:
            unsupported = unsupported_part(self._data) if isinstance(self._data, DataLoader) else None
            why = f"This one is read in its own order because of {unsupported}, and" if unsupported else "An iterable"
            advice = _PREPARED.get(type(self._data).__module__.partition(".")[0])
            general = (
                "a DataLoader over a map-style dataset, with no sampler but torch's sequential, random and distributed "
                f"ones, or a Headway stream. {why} brings its own batches; set gradient_accumulation_steps instead"
            )
            raise ConfigError(
                f"global_batch_size={shard.global_batch_size} needs data that can be cut to size: "
                + (general if advice is None else f"{advice}, in place of this {self._name}")
            )
        if shard.training and self._num_batches == 0:
            raise DataError(f"the training data, a {self._name}, has no batches")
        if shard.training and self.guarantee == "state":
            self._position = _RankPosition(shard)
        if shard.rank == 0 and shard.world_size > 1:
            self._warn_if_rows_repeat()

    def samples_in_epoch(self, epoch: int) -> None:
        """Return None: the number is unknown before the batches are read."""
        return

    def steps_in_epoch(self, epoch: int) -> int | None:
        """Return the number of global batches, or None if the iterable has no length."""
        return None if self._num_batches is None else ceil_div(self._num_batches, self._batches_per_step)

    def epoch(self, epoch: int, *, offset: int = 0) -> Iterator[GlobalBatch]:
        """Yield groups of batches from the start of the iterable, or from the current position of an iterator."""
        position = self._position
        if position is not None:
            position.begin_read()
        made = self._private_copy(self._make())
        keeps_workers = isinstance(made, DataLoader) and made.persistent_workers
        if _set_epoch(made, epoch) and epoch != self._epoch:
            # Persistent workers hold the dataset of the previous epoch.
            self.close()
        self._epoch = epoch
        group: list[Any] = []
        batches = iter(made) if position is None else position.open(made, epoch=epoch, num_batches=self._num_batches)
        self._batches = batches
        try:
            for batch in batches:
                self._repeats.add(batch)
                group.append(batch)
                if len(group) == self._batches_per_step:
                    if position is not None:
                        position.keep(len(group))
                    yield self._global_batch(group)
                    group = []
                    if position is not None:
                        position.begin_read()
            if position is not None:
                position.keep(len(group), has_ended=True)
            if group:
                yield self._global_batch(group)
                if position is not None:
                    position.begin_read()
        finally:
            if not keeps_workers:
                shut_down_workers(batches)

    def close(self) -> None:
        """Shut down a loader's worker processes; the next epoch starts new ones."""
        shut_down_workers(self._batches)
        if self._loader is not None:
            # A loader with persistent workers keeps its iterator, and would reuse it without workers.
            shut_down_workers(forget_iterator(self._loader))
        self._batches = None

    def _private_copy(self, made: Iterable[Any]) -> Iterable[Any]:
        """Return a copy of a loader with persistent workers, whose single iterator other streams may use too."""
        if not isinstance(made, DataLoader) or not made.persistent_workers:
            return made
        if self._loader is None or made is not self._copied_from:
            self._copied_from, self._loader = made, copy.copy(made)
            forget_iterator(self._loader)
        return self._loader

    def _warn_if_rows_repeat(self) -> None:
        """Warn if every rank reads all rows of a loader whose rows could have been divided."""
        data, shard = self._data, self._shard
        if not isinstance(data, DataLoader) or isinstance(data.dataset, IterableDataset) or _is_rank_aware(data):
            return
        role, effect = ("training", "is trained on") if shard.training else ("validation", "counts")
        warnings.warn(
            f"each of the {shard.world_size} ranks reads all rows of the {role} loader, so each row {effect} "
            f"{shard.world_size} times: the loader is read in its own order because of {unsupported_part(data)}. Let "
            "it read only the part of self.mesh.data.rank, or use a DataLoader without that",
            stacklevel=2,
        )

    @property
    def _batches_per_step(self) -> int:
        return self._shard.accumulation if self._shard.training else 1

    def _global_batch(self, group: list[Any]) -> LoadedBatch:
        num_samples = [batch_size(batch) for batch in group]
        return LoadedBatch(group, num_samples, sum(num_samples) if self._shard.world_size == 1 else None)


class _RankPosition:
    """The position of one rank, as a `Stateful`: the state of the data after the last batch that was yielded.

    Args:
        shard: of the run; its ranks are those that read different rows.

    Attributes:
        is_restored: whether the state that was loaded is one of this rank, on this number of ranks.
    """

    def __init__(self, shard: ShardInfo) -> None:
        self._here, self._seed = {"rank": shard.rank, "world_size": shard.world_size}, shard.seed
        self._source: Stateful | None = None
        self._kept: dict[str, Any] = {"epoch": -1, "batches": 0, "has_ended": False, "data": None}
        self._loaded: dict[str, Any] | None = None
        self._before = self.state_dict()
        self.is_restored = False

    def open(self, data: Iterable[Any], *, epoch: int, num_batches: int | None) -> Iterator[Any]:
        """Return an iterator over the rest of an epoch, or over a new one.

        Args:
            data: to read.
            epoch: in which to read; another one than that of a loaded state begins after it.
            num_batches: in an epoch, if known.
        """
        loaded = self._loaded if self.is_restored else None
        self._source = state_of(data)
        assert self._source is not None
        resumes = loaded is not None and loaded["epoch"] == epoch
        if loaded is not None and resumes and loaded["has_ended"]:
            # Nothing is left of this epoch; the state is for the next one.
            self._source = None
            return iter(())
        self._loaded, self._kept = None, {**self._kept, "epoch": epoch, "batches": 0, "has_ended": False}
        # What creating an iterator draws, such as the seed of a sampler, is a function of the epoch.
        with preserve_rng():
            if loaded is not None and loaded["data"] is not None:
                self._source.load_state_dict(copy.deepcopy(loaded["data"]))
                if resumes:
                    self._kept = {name: loaded[name] for name in self._kept}
                elif not loaded["has_ended"]:
                    # The run that saved would have left the epoch here, or have found that nothing is left of it.
                    before = iter(data)
                    if loaded["batches"] == num_batches:
                        next(before, None)
                    shut_down_workers(before)
            seed_for(self._seed, "data", self._here["rank"], epoch)
            return iter(data)

    def keep(self, num_batches: int = 0, *, has_ended: bool = False) -> None:
        """Keep the state for a save, after so many more batches.

        It is not asked for when a save begins, because that may be during a read.
        """
        if self._source is not None:
            batches, state = self._kept["batches"] + num_batches, copy.deepcopy(self._source.state_dict())
            self._kept = {**self._kept, "batches": batches, "has_ended": has_ended, "data": state}

    def begin_read(self) -> None:
        """Note that the next batches are about to be read."""
        self._before = self.state_dict()

    def before_read(self) -> _Position:
        """Return the position of the last `begin_read`."""
        return _Position(self._before)

    def state_dict(self) -> dict[str, Any]:
        """Return the position; one that was loaded, and not read from yet, as it was saved."""
        return {**self._here, **self._kept} if self._loaded is None else self._loaded

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a position, if it is that of this rank on this number of ranks."""
        self._loaded, self.is_restored = state_dict, self._here.items() <= state_dict.items()


class _Position:
    """A position that was taken earlier, to be saved."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> NoReturn:
        """Refuse: it is only saved."""
        raise NotImplementedError


def state_of(data: Any) -> Stateful | None:
    """Return the object whose state is the position in `data`, or None.

    The data itself, such as torchdata's `StatefulDataLoader`, a dataset or an iterator. For data of Grain, see
    `IteratorState`. Or the dataset of a DataLoader,
    if it is iterable, or its sampler, if the loader reads in this process: worker processes read ahead.
    """
    if isinstance(data, Stateful):
        return data
    if not isinstance(data, DataLoader) or data.num_workers:
        return None
    if isinstance(data.dataset, IterableDataset):
        return data.dataset if isinstance(data.dataset, Stateful) else None
    samplers = (data.batch_sampler, getattr(data.batch_sampler, "sampler", None), data.sampler)
    return next((each for each in samplers if isinstance(each, Stateful)), None)


def _set_epoch(data: Any, epoch: int) -> bool:
    """Call every `set_epoch` of a loader and its parts; return whether its dataset has one."""
    batch_sampler, dataset = getattr(data, "batch_sampler", None), getattr(data, "dataset", None)
    parts = (data, getattr(data, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None), dataset)
    for part in {id(part): part for part in parts}.values():  # the batch sampler usually shares the loader's sampler
        if (set_epoch := getattr(part, "set_epoch", None)) is not None:
            set_epoch(epoch)
    return hasattr(dataset, "set_epoch")


def _is_rank_aware(loader: DataLoader[Any]) -> bool:
    """Whether a sampler of the loader splits the rows by rank."""
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    return any(hasattr(each, name) for each in samplers for name in ("num_replicas", "rank", "process_index"))


def _length(data: Any) -> int | None:
    """Return the number of batches if known: a DataLoader asks its sampler, which may lack or only estimate it."""
    if not isinstance(data, Sized) or (isinstance(data, DataLoader) and isinstance(data.dataset, IterableDataset)):
        return None
    try:
        return len(data)
    except TypeError:
        return None
