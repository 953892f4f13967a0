"""Where a training in exact mode differs from an ordinary one. The only place that asks for `config.exact`.

`Numerics` is ordinary floating-point training; its subclass promises the same bits at every number of ranks. The loop,
the evaluation, the setup and the checks of a resumed run ask the one of `numerics_of`, and never the config.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from ..checkpoints.rng import RngState, seed_for
from ..config import TrainerConfig
from ..data.protocols import BatchStream, GlobalBatch, SupportsShards, micro_batch_ranges
from ..distributed import parallelize
from ..distributed.world import World
from ..errors import ConfigError
from ..loop.context import RunContext
from ..loop.steps import Steps
from ..metrics.means import MeanMetrics
from ..step.auto_microbatch import AutoMicrobatchStep
from ..step.optimizer_step import OptimizerStep
from .checks import check_exact_config, check_exact_data, check_exact_metrics, check_exact_models
from .determinism import clone_batch, deterministic_mode, hardware_fingerprint
from .means import ExactMeans
from .step import ExactStep


def numerics_of(config: TrainerConfig) -> Numerics:
    """Returns how a training with this config computes."""
    return _ExactNumerics() if config.exact else Numerics()


class Numerics:
    """Ordinary floating-point training: sums are in the order of the ranks, and each rank draws its own numbers.

    Attributes:
        cuts_by_shard: whether no micro-batch may have rows of two logical shards.
        skips_padding: whether an evaluation leaves out the batches that only keep the ranks in step.
        may_halve: whether micro-batches may be cut when memory runs out.
    """

    cuts_by_shard = False
    skips_padding = False
    may_halve = True

    def check_config(self, config: TrainerConfig) -> None:
        """Refuses what this cannot keep, as far as the config tells."""

    def check_models(self, models: Mapping[str, nn.Module]) -> None:
        """Refuses models whose result would differ."""

    def check_metrics(self, metrics: Collection[str]) -> None:
        """Refuses metrics whose result would differ."""

    def check_data(self, data: BatchStream, validation: Mapping[str, BatchStream], world: World) -> None:
        """Refuses data that cannot be cut as needed."""

    def check_own_batch(self) -> None:
        """Refuses an update of a batch that is not the epoch's, where that cannot be kept."""

    def facts(self, device: torch.device) -> dict[str, str]:
        """Returns what must be equal on all ranks, and on resume, besides config and code."""
        return {}

    def deterministic(self, device: torch.device) -> AbstractContextManager[None]:
        """Returns the context in which a training computes."""
        return nullcontext()

    def make_step(self, ctx: RunContext, steps: Steps, metrics: MeanMetrics, data: BatchStream) -> OptimizerStep:
        """Returns what makes one update."""
        kind = AutoMicrobatchStep if ctx.config.halve_on_out_of_memory else OptimizerStep
        return kind(ctx, steps, metrics)

    def make_means(self) -> MeanMetrics:
        """Returns what averages metrics."""
        return MeanMetrics()

    def replicate(self, model: nn.Module, config: TrainerConfig, world: World) -> nn.Module:
        """Returns the model whose gradients are synchronised, wrapped where the strategy asks for it."""
        return parallelize.replicate(model, config.parallel, world)

    def seed_rank(self, world: World) -> int:
        """Returns the number by which the random numbers of this rank differ from those of others."""
        return world.rank

    def share_rng(self, world: World) -> bool:
        """Gives ranks that join a run the random numbers of the others; returns whether it did."""
        return False

    def seed_after_evaluation(self, config: TrainerConfig, step: int) -> None:
        """Seeds what is drawn after an evaluation."""

    def evaluation_batch(self, config: TrainerConfig, batch: Any, *key: str | int) -> Any:
        """Returns a batch of an evaluation as the step is to see it, and seeds what the step draws."""
        return batch

    def batch_numbers(self, stream: BatchStream, batch: GlobalBatch, first: int, world: World) -> tuple[range, int]:
        """Returns the numbers of this rank's micro-batches in an evaluation, and the first of the next batch."""
        num_own = len(batch.micro_batches)
        return range(first, first + num_own), first + num_own


class _ExactNumerics(Numerics):
    """The same bits at every number of ranks."""

    cuts_by_shard = True
    skips_padding = True
    may_halve = False

    def check_config(self, config: TrainerConfig) -> None:
        check_exact_config(config)

    def check_models(self, models: Mapping[str, nn.Module]) -> None:
        check_exact_models(models)

    def check_metrics(self, metrics: Collection[str]) -> None:
        check_exact_metrics(metrics)

    def check_data(self, data: BatchStream, validation: Mapping[str, BatchStream], world: World) -> None:
        check_exact_data(data, validation, world)

    def check_own_batch(self) -> None:
        raise ConfigError(
            "exact=True learns from the batches of configure_dataloaders, which are cut in the same way for any "
            "number of ranks, and train_step was given another: call train_epoch, or leave exact out"
        )

    def facts(self, device: torch.device) -> dict[str, str]:
        return hardware_fingerprint(device)

    def deterministic(self, device: torch.device) -> AbstractContextManager[None]:
        return deterministic_mode(device)

    def make_step(self, ctx: RunContext, steps: Steps, metrics: MeanMetrics, data: BatchStream) -> OptimizerStep:
        assert isinstance(data, SupportsShards)
        return ExactStep(ctx, steps, metrics, ExactMeans(), data)

    def make_means(self) -> MeanMetrics:
        return ExactMeans()

    def replicate(self, model: nn.Module, config: TrainerConfig, world: World) -> nn.Module:
        # The step itself adds gradients up, in one order for any number of ranks.
        parallelize.broadcast_weights(model, world)
        return model

    def seed_rank(self, world: World) -> int:
        return 0

    def share_rng(self, world: World) -> bool:
        generators = RngState()
        generators.load_state_dict(world.broadcast(generators.state_dict()))
        return True

    def seed_after_evaluation(self, config: TrainerConfig, step: int) -> None:
        seed_for(config.seed, "after an evaluation", step)

    def evaluation_batch(self, config: TrainerConfig, batch: Any, *key: str | int) -> Any:
        seed_for(config.seed, *key)
        return clone_batch(batch)

    def batch_numbers(self, stream: BatchStream, batch: GlobalBatch, first: int, world: World) -> tuple[range, int]:
        if not isinstance(stream, SupportsShards):
            return super().batch_numbers(stream, batch, first, world)
        ranges = micro_batch_ranges(stream.num_shards, world.size, num_own=len(batch.micro_batches), rank=world.rank)
        own = ranges[world.rank]
        return range(first + own.start, first + own.stop), first + ranges[-1].stop
