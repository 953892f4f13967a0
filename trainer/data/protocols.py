"""The interfaces of training data, required and optional, and of checkpointed state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Protocol, TypeGuard, runtime_checkable

import torch

from ..config import TrainerConfig
from ..errors import ConfigError

Guarantee = Literal["exact", "state", "epoch", "none"]


@runtime_checkable
class Stateful(Protocol):
    """An object whose state is saved in checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors and plain values, in any nesting."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore a state that `state_dict` returned, possibly in another process."""


class GlobalBatch(Protocol):
    """This rank's part of the samples of one optimizer update.

    Attributes:
        micro_batches: the arguments of `training_step`, in order; the same number on every rank.
        num_samples: number of samples in each micro-batch that count; 0 for padding that only keeps the ranks in step.
        global_num_samples: number of samples in the update over all ranks; None if it takes a collective to know.
    """

    @property
    def micro_batches(self) -> Sequence[Any]:
        """The arguments of `training_step`."""

    @property
    def num_samples(self) -> Sequence[int]:
        """Number of samples in each micro-batch that count."""

    @property
    def global_num_samples(self) -> int | None:
        """Number of samples in the update over all ranks."""


@dataclass(frozen=True, slots=True)
class LoadedBatch:
    """A plain `GlobalBatch`, with the dataset index of each row if known."""

    micro_batches: Sequence[Any]
    num_samples: Sequence[int]
    global_num_samples: int | None
    rows: Sequence[Sequence[int]] = ()

    def row_ids(self) -> Sequence[Sequence[int]]:
        """Return the dataset indices of the rows of each micro-batch."""
        return self.rows

    def __getitem__(self, key: Any) -> NoReturn:
        """Refuse to be unpacked or indexed as one batch of tensors."""
        raise TypeError(
            "this is a global batch, which may have several micro-batches: "
            "take its tensors from `for micro_batch in run.accumulate(batch)`"
        )


@runtime_checkable
class HasRowIds(Protocol):
    """A `GlobalBatch` that knows the ids of its rows, so that errors can name the offending rows."""

    def row_ids(self) -> Sequence[Sequence[int | str]]:
        """Return the ids of the rows of each micro-batch; empty if unknown."""


@runtime_checkable
class HasDroppedTail(Protocol):
    """A `BatchStream` that drops the samples at the end of an epoch that do not fill a global batch."""

    def dropped_in_epoch(self, epoch: int, *, offset: int = 0) -> int:
        """Return the number of dropped samples, over all ranks, if global batches are cut from `offset` on."""


@runtime_checkable
class SupportsPeek(Protocol):
    """A `BatchStream` that knows its next rows without reading them, so that a resumed run can be verified."""

    @property
    def samples_per_step(self) -> int:
        """Samples of one update over all ranks."""

    def next_rows(self, epoch: int, *, offset: int, count: int) -> Sequence[int | str]:
        """Return the ids of the next rows over all ranks, at most `count`, in order.

        The same on any number of ranks. May be called while another thread reads.
        """


@runtime_checkable
class SupportsDiff(Protocol):
    """A `BatchStream` whose fingerprint includes how rows are read, and that can explain a change of it."""

    def explain_change(self, before: str) -> str | None:
        """Return how reading differs from an earlier fingerprint and what to do; None if the rows themselves differ."""


@runtime_checkable
class HasOrder(Protocol):
    """A `BatchStream` whose order may be changed in mid-run, from a position on: a mixture gets other weights."""

    @property
    def order(self) -> Mapping[str, Any] | None:
        """The order so far, as plain values, with `changes`: a line for each. None if it cannot change."""

    def continue_order(
        self, order: Mapping[str, Any], *, step: int, epoch: int, offset: int, accept_changes: bool
    ) -> Sequence[str]:
        """Take over `order` of an earlier stream up to a position, before anything is read; return what changes there.

        Its own settings hold from there on if they differ and the change is accepted: then it returns a line. Unless it
        does, a stream that would not continue the earlier one has another fingerprint.
        """


@runtime_checkable
class HasUnequalEpochs(Protocol):
    """A `BatchStream` whose epochs may have different lengths, all of them known."""

    @property
    def epochs_differ(self) -> bool:
        """Whether they may; the length of a run is then the sum over its epochs."""


@runtime_checkable
class HasSources(Protocol):
    """A `BatchStream` that mixes several sources, and whose rows say from which one they come."""

    @property
    def source_names(self) -> Sequence[str]:
        """The name of each source, by its index; empty without a mixture."""


@runtime_checkable
class Mergeable(Protocol):
    """A per-rank `Stateful` whose states can be added, so that a run can resume on fewer ranks."""

    def add_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Add the state that `state_dict` returned on another rank."""


@runtime_checkable
class HasRankState(Protocol):
    """A `BatchStream` with a `Stateful` position of each rank besides the samples that all ranks have consumed."""

    @property
    def rank_state(self) -> Stateful | None:
        """The position of this rank; None if the data has no state."""

    @property
    def rank_state_before_read(self) -> Stateful | None:
        """The position before the read in progress, or before the last one: without the batch that it has returned."""

    def return_to_before_read(self) -> None:
        """Continue at that position in the next `epoch`, because the batch was not used."""

    @property
    def is_restored(self) -> bool:
        """Whether a loaded position continues here, as it was saved on the same number of ranks; equal on all ranks."""


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
    """Which part of the data a stream reads, and how. Matched structurally: other packages need not import it.

    Attributes:
        rank, world_size: select this rank's part of every global batch.
        global_batch_size: samples per update over all ranks; None for the loader's batch size.
        micro_batch_size: maximum samples per forward pass; None for a batch of the loader, or without a loader the
            rank's whole part of the update.
        accumulation: micro-batches per update, for loaders that form their own batches.
        seed: seed of the order of the data; the same on all ranks.
        device: the batches' device.
        training: False for evaluation, which reads every row exactly once, in a fixed order.
        by_shard: whether each micro-batch has rows of a single logical shard; see `SupportsShards`.
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

    The position is one number: the samples of the epoch that all ranks together have consumed. The loop saves it
    in every checkpoint and passes it to `epoch`; a stream need not remember it.
    """

    @property
    def guarantee(self) -> Guarantee:
        """Where a run can resume.

        "exact": at any position, on any number of ranks; "state": where the `state_dict` of the data says, on the same
        number of ranks; "epoch": at the start of an epoch; "none": nowhere.
        """

    @property
    def fingerprint(self) -> str | None:
        """Identifies the data: changes when the data changes; None if unknown."""

    def setup(self, shard: ShardInfo) -> None:
        """Check the data against `shard`, without reading rows. Called once, before anything else."""

    def samples_in_epoch(self, epoch: int) -> int | None:
        """Return the number of samples per epoch over all ranks, without a dropped tail; None if unknown."""

    def steps_in_epoch(self, epoch: int) -> int | None:
        """Return the number of global batches per full epoch; None if unknown."""

    def epoch(self, epoch: int, *, offset: int = 0) -> Iterator[GlobalBatch]:
        """Yield the global batches of an epoch from `offset` on, the same number on every rank.

        The iterator may be closed early. A stream whose guarantee is not "exact" ignores the offset, and its ranks may
        yield different numbers of batches.
        """

    def close(self) -> None:
        """Stop the stream's threads and processes. May be called twice."""


def is_exhausted(data: BatchStream, *, epoch: int, steps: int, offset: int) -> bool:
    """Return whether an epoch has no batch left; False if the data has no known length.

    Exact data is compared by samples, because batches may have had another size before a resume.

    Args:
        data: a stream after `setup`.
        epoch: the epoch in progress.
        steps: updates of the epoch so far.
        offset: samples of the epoch so far, over all ranks.
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
    """Check that the data provides what the config needs.

    Raises:
        ConfigError: the end of an epoch is needed but unknown, or validation data is needed but missing.
    """
    limits = (config.max_steps, config.max_samples, config.max_tokens, config.steps_per_epoch)
    endless = all(limit is None for limit in limits)
    if endless and data.guarantee == "none":
        raise ConfigError(
            f"max_epochs={config.max_epochs} counts epochs, but the training data is an iterator with an unknown end: "
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
            "from configure_dataloaders, or remove the setting"
        )
