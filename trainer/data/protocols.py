"""What the loop asks of its data and of the parts of its state. `loaders.py` makes streams of loaders."""

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
        """Returns the state: tensors, and what pickles."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Takes over a state that `state_dict` returned, perhaps in another process."""
        ...


class GlobalBatch(Protocol):
    """This rank's part of the samples of one optimizer update.

    Attributes:
        micro_batches: what `training_step` gets, one after the other; equally many on every rank.
        num_samples: how many samples of each micro-batch count; 0 marks rows that only keep the ranks in step.
        global_num_samples: samples of the whole update over all ranks, or None where only a collective can tell.
    """

    @property
    def micro_batches(self) -> Sequence[Any]:
        """What `training_step` gets."""
        ...

    @property
    def num_samples(self) -> Sequence[int]:
        """How many samples of each count."""
        ...

    @property
    def global_num_samples(self) -> int | None:
        """Samples of the update over all ranks."""
        ...


@runtime_checkable
class HasRowIds(Protocol):
    """A `GlobalBatch` that can say which rows of the data it holds, for the error that blames some of them."""

    def row_ids(self) -> Sequence[Sequence[int | str]]:
        """Returns the rows of each micro-batch by what they are called in the data; nothing where nobody knows."""
        ...


@runtime_checkable
class HasDroppedTail(Protocol):
    """A `BatchStream` that knows how many samples of an epoch fill no global batch, and are left out."""

    def dropped_in_epoch(self, epoch: int, *, offset: int = 0) -> int:
        """Returns how many, over all ranks, where the global batches are cut from `offset` on."""
        ...


@runtime_checkable
class SupportsPeek(Protocol):
    """A `BatchStream` that knows which rows come next without reading them: a resumed run proves itself by them."""

    @property
    def samples_per_step(self) -> int:
        """Samples of one update over all ranks."""
        ...

    def next_rows(self, epoch: int, *, offset: int, count: int) -> Sequence[int | str]:
        """Returns the next rows over all ranks by what they are called in the data, at most `count`, in their order.

        The same at every number of ranks. Another thread than the one that reads may call this.
        """
        ...


@runtime_checkable
class SupportsDiff(Protocol):
    """A `BatchStream` whose fingerprint also changes with how its rows are read, and that can tell this from others."""

    def explain_change(self, before: str) -> str | None:
        """Says what of the reading is not as it was under this fingerprint, and what to do; None if the rows differ."""
        ...


@runtime_checkable
class Mergeable(Protocol):
    """A `Stateful` that each rank keeps for itself, and whose states add up: ranks that are gone leave theirs."""

    def add_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Adds what `state_dict` returned on another rank."""
        ...


@runtime_checkable
class SupportsShards(Protocol):
    """A `BatchStream` that can cut every global batch by logical shards, in the same way for any number of ranks.

    With `ShardInfo.by_shard` it gives a rank equally many micro-batches for each of its logical shards, those of one
    shard after the other, independent of the number of ranks. Rank r of R owns the shards from `num_shards * r // R` up
    to `num_shards * (r + 1) // R`.
    """

    @property
    def num_shards(self) -> int:
        """Logical shards, the same for the whole run; known once the stream is open."""
        ...


def micro_batch_ranges(num_shards: int, world_size: int, *, num_own: int, rank: int) -> list[range]:
    """Numbers the micro-batches of a global batch that is cut by shard, from 0 over all ranks; returns those of each.

    Args:
        num_shards: logical shards.
        world_size: ranks.
        num_own: micro-batches of one rank.
        rank: which; one that owns no shard tells nothing of the others.
    """
    ends = [num_shards * each // world_size for each in range(world_size + 1)]
    pieces = num_own // max(1, ends[rank + 1] - ends[rank])
    return [range(begin * pieces, end * pieces) for begin, end in zip(ends, ends[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """What a stream must know of the run before it can be read; other packages take it by shape, not by import.

    Attributes:
        rank, world_size: which part of every global batch is this rank's.
        global_batch_size: samples of one update over all ranks; None leaves it to the loader.
        micro_batch_size: at most this many samples in one forward pass; None: all that the rank has of the update.
        accumulation: micro-batches of one update, for loaders that bring their own batches.
        seed: of the order of the data; the same on all ranks.
        device: where the batches are to lie.
        training: an evaluation stream gives every row exactly once, in a fixed order.
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
    """Batches of one rank, epoch by epoch, from any place in an epoch.

    The place is one number: the samples of the epoch that all ranks together have consumed. The loop keeps it (it is
    in every checkpoint) and hands it back; a stream holds no position of its own that matters.
    """

    @property
    def guarantee(self) -> Guarantee:
        """What is found again: "exact" any offset, "epoch" only the start of an epoch, "none" not even that."""
        ...

    @property
    def fingerprint(self) -> str | None:
        """Changes when the data changes; None where nobody can tell."""
        ...

    def setup(self, shard: ShardInfo) -> None:
        """Tells the stream who reads it. Called once, before anything else; opening checks, and reads no rows."""
        ...

    def samples_in_epoch(self, epoch: int) -> int | None:
        """Samples of one epoch over all ranks, after what the tail policy drops; None where nobody can tell."""
        ...

    def steps_in_epoch(self, epoch: int) -> int | None:
        """Global batches of one whole epoch; None where nobody can tell."""
        ...

    def epoch(self, epoch: int, *, offset: int = 0) -> Iterator[GlobalBatch]:
        """Yields the global batches of an epoch from `offset` on. Equally many on every rank.

        The iterator may be closed before its end. A stream whose guarantee is not "exact" ignores the offset.
        """
        ...

    def close(self) -> None:
        """Ends its threads and processes. May be called twice."""
        ...


def is_exhausted(data: BatchStream, *, epoch: int, steps: int, offset: int) -> bool:
    """Whether an epoch of which so much has been consumed has no batch left, as far as the data has a length.

    Exact data is asked by samples: a resumed run may have other batches than those that were counted before.

    Args:
        data: open.
        epoch: in progress.
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
    """Whether something has all that a `BatchStream` has. Looks at its class: before `setup` it may have no answers."""
    wanted = {name for name in vars(BatchStream) if not name.startswith("_")}
    return wanted <= set(dir(type(data)))


def check_data(config: TrainerConfig, data: BatchStream, validation: Mapping[str, BatchStream]) -> None:
    """Refuses a config that wants of the data what it has not.

    Raises:
        ConfigError: nothing says when an epoch ends, or there is no validation data and something needs it.
    """
    limits = (config.max_steps, config.max_samples, config.max_tokens, config.steps_per_epoch)
    endless = all(limit is None for limit in limits)
    if endless and data.guarantee == "none":
        raise ConfigError(
            f"max_epochs={config.max_epochs} counts epochs, and an iterator has no end that anybody could know of: "
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
