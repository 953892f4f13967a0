"""The interfaces of training data, required and optional, and of checkpointed state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeGuard, runtime_checkable

import torch

from ..config import TrainerConfig
from ..errors import ConfigError

Guarantee = Literal["exact", "epoch", "none"]


@runtime_checkable
class Stateful(Protocol):
    """Anything whose state goes into a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors and picklable objects."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restores a state that `state_dict` returned, perhaps in another process."""
        ...


class GlobalBatch(Protocol):
    """This rank's part of the samples of one optimizer update.

    Attributes:
        micro_batches: the arguments of `training_step`, in order; the same number on every rank.
        num_samples: samples of each micro-batch that count; 0 marks rows that only keep the ranks in step.
        global_num_samples: samples of the whole update over all ranks; None if only a collective can tell.
    """

    @property
    def micro_batches(self) -> Sequence[Any]:
        """The arguments of `training_step`."""
        ...

    @property
    def num_samples(self) -> Sequence[int]:
        """Samples of each that count."""
        ...

    @property
    def global_num_samples(self) -> int | None:
        """Samples of the update over all ranks."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedBatch:
    """A plain `GlobalBatch`, with the dataset index of each row where known."""

    micro_batches: Sequence[Any]
    num_samples: Sequence[int]
    global_num_samples: int | None
    rows: Sequence[Sequence[int]] = ()

    def row_ids(self) -> Sequence[Sequence[int]]:
        """Return the dataset indices of the rows of each micro-batch."""
        return self.rows


@runtime_checkable
class HasRowIds(Protocol):
    """A `GlobalBatch` that knows the ids of its rows, for errors that name the rows at fault."""

    def row_ids(self) -> Sequence[Sequence[int | str]]:
        """Return the ids of the rows of each micro-batch; empty if unknown."""
        ...


@runtime_checkable
class HasDroppedTail(Protocol):
    """A `BatchStream` that leaves out the samples at the end of an epoch that fill no global batch."""

    def dropped_in_epoch(self, epoch: int, *, offset: int = 0) -> int:
        """Return the number left out, over all ranks, if the global batches are cut from `offset` on."""
        ...


@runtime_checkable
class SupportsPeek(Protocol):
    """A `BatchStream` that knows the next rows without reading them, which a resumed run is verified by."""

    @property
    def samples_per_step(self) -> int:
        """Samples of one update over all ranks."""
        ...

    def next_rows(self, epoch: int, *, offset: int, count: int) -> Sequence[int | str]:
        """Return the ids of the next rows over all ranks, at most `count`, in order.

        The same on any number of ranks. May be called from another thread than the reading one.
        """
        ...


@runtime_checkable
class SupportsDiff(Protocol):
    """A `BatchStream` whose fingerprint includes how its rows are read, and that can explain such a change."""

    def explain_change(self, before: str) -> str | None:
        """Return how reading differs from this earlier fingerprint, and what to do; None if the rows differ."""
        ...


@runtime_checkable
class Mergeable(Protocol):
    """A per-rank `Stateful` whose states can be summed, so that fewer ranks can resume the states of more."""

    def add_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Add what `state_dict` returned on another rank."""
        ...


@runtime_checkable
class SupportsShards(Protocol):
    """A `BatchStream` that can split every global batch by logical shards, the same on any number of ranks.

    With `ShardInfo.by_shard` a rank gets the same number of micro-batches for each of its logical shards, shard by
    shard, whatever the number of ranks. Rank r of R owns the shards from `num_shards * r // R` up to
    `num_shards * (r + 1) // R`.
    """

    @property
    def num_shards(self) -> int:
        """Logical shards, constant over the run; known after `setup`."""
        ...


def micro_batch_ranges(num_shards: int, world_size: int, *, num_own: int, rank: int) -> list[range]:
    """Return the indices of each rank's micro-batches within a global batch that is split by shard.

    Args:
        num_shards: logical shards.
        world_size: number of ranks.
        num_own: micro-batches of rank `rank`.
        rank: a rank that owns at least one shard.
    """
    ends = [num_shards * each // world_size for each in range(world_size + 1)]
    per_shard = num_own // max(1, ends[rank + 1] - ends[rank])
    return [range(begin * per_shard, end * per_shard) for begin, end in zip(ends, ends[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """Which part of the data a stream reads, and how. Other packages match it by shape and do not import it.

    Attributes:
        rank, world_size: select this rank's part of every global batch.
        global_batch_size: samples of one update over all ranks; None: as the loader has it.
        micro_batch_size: the most samples of one forward pass; None: the rank's whole part of the update.
        accumulation: micro-batches of one update, for loaders that bring their own batches.
        seed: of the order of the data; the same on all ranks.
        device: of the batches.
        training: False for evaluation, which reads every row exactly once, in a fixed order.
        by_shard: no micro-batch has rows of two logical shards; see `SupportsShards`.
    """

    rank: int
    world_size: int
    global_batch_size: int | None
    micro_batch_size: int | None
    accumulation: int
    seed: int
    device: torch.device
    training: bool
    by_shard: bool = False


class BatchStream(Protocol):
    """Batches of one rank, epoch by epoch, from any position in an epoch.

    The position is one number: the samples of the epoch that all ranks together have consumed. The loop keeps it, in
    every checkpoint, and passes it to `epoch`; a stream need not remember it.
    """

    @property
    def guarantee(self) -> Guarantee:
        """Positions that a resumed run finds again: "exact" any, "epoch" the start of an epoch, "none" none."""
        ...

    @property
    def fingerprint(self) -> str | None:
        """Changes when the data changes; None if unknown."""
        ...

    def setup(self, shard: ShardInfo) -> None:
        """Called once, before anything else: check the data against `shard`, without reading rows."""
        ...

    def samples_in_epoch(self, epoch: int) -> int | None:
        """Return the samples of one epoch over all ranks, without a dropped tail; None if unknown."""
        ...

    def steps_in_epoch(self, epoch: int) -> int | None:
        """Return the global batches of one whole epoch; None if unknown."""
        ...

    def epoch(self, epoch: int, *, offset: int = 0) -> Iterator[GlobalBatch]:
        """Yield the global batches of an epoch from `offset` on, the same number on every rank.

        The iterator may be closed early. A stream whose guarantee is not "exact" ignores the offset, and its ranks may
        yield different numbers of batches.
        """
        ...

    def close(self) -> None:
        """End its threads and processes. May be called twice."""
        ...


def is_exhausted(data: BatchStream, *, epoch: int, steps: int, offset: int) -> bool:
    """Whether an epoch has no batch left, if the data has a length.

    Exact data is compared by samples: before a resume, batches may have had another size.

    Args:
        data: after `setup`.
        epoch: the epoch in progress.
        steps: updates of it so far.
        offset: samples of it so far, over all ranks.
    """
    end = data.samples_in_epoch(epoch) if data.guarantee == "exact" else None
    if end is None:
        return steps == data.steps_in_epoch(epoch)
    if isinstance(data, HasDroppedTail):
        end += data.dropped_in_epoch(epoch) - data.dropped_in_epoch(epoch, offset=offset)
    return offset >= end


def is_stream(data: Any) -> TypeGuard[BatchStream]:
    """Whether the class of `data` has all members of `BatchStream`; before `setup` its properties may raise."""
    wanted = {name for name in vars(BatchStream) if not name.startswith("_")}
    return wanted <= set(dir(type(data)))


def check_data(config: TrainerConfig, data: BatchStream, validation: Mapping[str, BatchStream]) -> None:
    """Check that the data has what the config needs.

    Raises:
        ConfigError: an epoch has no known end, or something needs validation data and there is none.
    """
    limits = (config.max_steps, config.max_samples, config.max_tokens, config.steps_per_epoch)
    endless = all(limit is None for limit in limits)
    if endless and data.guarantee == "none":
        raise ConfigError(
            f"max_epochs={config.max_epochs} counts epochs, and the end of an iterator (the training data) is unknown: "
            "set steps_per_epoch, or max_steps, max_samples or max_tokens instead"
        )
    wanting = {
        "checkpoint.save_best": config.checkpoint.save_best,
        "evaluate_at_start": config.evaluate_at_start,
        "sanity_batches": config.sanity_batches > 0,
    }
    if not validation and (names := [name for name, wants in wanting.items() if wants]):
        raise ConfigError(
            f"{' and '.join(names)} needs an evaluation, and there is no validation data: return (train, validation) "
            "from configure_dataloaders, or leave it out"
        )
