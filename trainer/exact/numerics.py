"""The differences between exact and ordinary training. Only this module reads `config.exact`.

`Numerics` is ordinary floating-point training; its subclass promises the same bits on any number of ranks. The loop,
the evaluation, the setup and the checks of a resumed run use the object returned by `numerics_of`, not the config.
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
from .determinism import clone_batch, deterministic_mode, hardware_fingerprint, set_cublas_workspace
from .means import ExactMeans
from .step import ExactStep


def numerics_of(config: TrainerConfig) -> Numerics:
    """Return the numerics that a config selects."""
    return _ExactNumerics() if config.exact else Numerics()


class Numerics:
    """Ordinary floating-point training: sums are in rank order, and each rank draws different random numbers.

    Attributes:
        cuts_by_shard: whether each micro-batch must have rows of a single logical shard.
        skips_padding: whether evaluations skip padding batches, which only keep the ranks in step.
        may_halve: whether micro-batches may be split when memory runs out.
    """

    cuts_by_shard = False
    skips_padding = False
    may_halve = True

    def check_config(self, config: TrainerConfig) -> None:
        """Raise ConfigError if a setting is not supported."""

    def check_models(self, models: Mapping[str, nn.Module]) -> None:
        """Raise ConfigError if a model is not supported."""

    def check_metrics(self, metrics: Collection[str]) -> None:
        """Raise ConfigError if a metric is not supported."""

    def check_data(self, data: BatchStream, validation: Mapping[str, BatchStream], world: World) -> None:
        """Raise ConfigError if the data cannot be split as needed."""

    def check_own_batch(self) -> None:
        """Raise ConfigError if updates from a batch outside the epoch are not supported."""

    def facts(self, device: torch.device) -> dict[str, str]:
        """Return facts besides config and code that must be equal on all ranks and after a resume."""
        return {}

    def deterministic(self, device: torch.device) -> AbstractContextManager[None]:
        """Return the context in which training computes."""
        return nullcontext()

    def make_step(self, ctx: RunContext, steps: Steps, metrics: MeanMetrics, data: BatchStream) -> OptimizerStep:
        """Return the optimizer step."""
        kind = AutoMicrobatchStep if ctx.config.halve_on_out_of_memory else OptimizerStep
        return kind(ctx, steps, metrics)

    def make_means(self) -> MeanMetrics:
        """Return an empty accumulator of metrics."""
        return MeanMetrics()

    def replicate(
        self, model: nn.Module, config: TrainerConfig, world: World, *, gradients_are_kept: bool
    ) -> nn.Module:
        """Return the model with gradient synchronisation, wrapped as in `parallelize.replicate`."""
        return parallelize.replicate(model, config.parallel, world, gradients_are_kept=gradients_are_kept)

    def seed_rank(self, world: World) -> int:
        """Return the number that distinguishes this rank's random numbers from those of other ranks."""
        return world.rank

    def share_rng(self, world: World) -> bool:
        """Copy rank 0's random state to all ranks, for ranks that join a run; return whether it was copied."""
        return False

    def seed_after_evaluation(self, config: TrainerConfig, step: int) -> None:
        """Seed the random numbers drawn after an evaluation."""

    def evaluation_batch(self, config: TrainerConfig, batch: Any, *key: str | int) -> Any:
        """Return an evaluation batch as passed to the step, and seed the step's random numbers."""
        return batch

    def batch_numbers(self, stream: BatchStream, batch: GlobalBatch, first: int, world: World) -> tuple[range, int]:
        """Return the numbers of this rank's micro-batches in an evaluation, and the first number of the next batch."""
        num_own = len(batch.micro_batches)
        return range(first, first + num_own), first + num_own


class _ExactNumerics(Numerics):
    """Exact mode: the same bits on any number of ranks."""

    cuts_by_shard = True
    skips_padding = True
    may_halve = False

    def __init__(self) -> None:
        set_cublas_workspace()

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
            "exact=True supports only batches of configure_dataloaders, which are split in the same way on any number "
            "of ranks, but train_step got another batch: call train_epoch, or remove exact"
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

    def replicate(
        self, model: nn.Module, config: TrainerConfig, world: World, *, gradients_are_kept: bool
    ) -> nn.Module:
        # The step itself sums gradients, in the same order on any number of ranks.
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
