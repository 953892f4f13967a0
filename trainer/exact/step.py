"""One optimizer step in exact mode, in which the bits of a training run do not depend on the number of ranks.

On any number of ranks a global batch is split into the same *parts*, logical shards or equal fractions of them, and a
part is one micro-batch. Its random numbers are keyed by (seed, step, part), its gradient is computed separately, and
the gradients of all parts are summed in the order of one tree (gradient_tree.py); sums of metrics are exact (means.py).
The arithmetic within a micro-batch is made deterministic (determinism.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..checkpoints.rng import seed_for
from ..data.protocols import GlobalBatch, SupportsShards, micro_batch_ranges
from ..errors import StepError
from ..loop.context import RunContext
from ..loop.steps import LossWeight, Steps
from ..metrics.means import MeanMetrics
from ..private_torch import version_of
from ..step.optimizer_step import OptimizerStep
from .determinism import clone_batch, deterministic_mode
from .gradient_tree import GradientTree, covering_nodes


class ExactStep(OptimizerStep):
    """Makes one update whose result is bit-identical on any number of ranks.

    Args:
        ctx: the run's context; no wrapper synchronises the gradients of its models.
        steps: the user's steps.
        metrics: exact means of what the steps return.
        logged: exact means of what the steps log.
        data: a stream that splits batches by logical shards.
    """

    def __init__(
        self, ctx: RunContext, steps: Steps, metrics: MeanMetrics, logged: MeanMetrics, data: SupportsShards
    ) -> None:
        super().__init__(ctx, steps, metrics)
        self.logged = logged
        self._isolation = None
        self._rng = None  # all ranks have the same random state between two parts
        self._num_shards = data.num_shards
        self._inside_part = False
        self._combining_s = 0.0
        self._num_combined = 0

    def describe(self) -> str:
        """Return a line on the communication per update, compared to DDP, which sends the gradient twice."""
        world, shards = self._world, self._num_shards
        numbers = sum(p.numel() * max(p.element_size(), 4) for p in _trainable(self._optimizers))
        own = shards * (world.rank + 1) // world.size - shards * world.rank // world.size
        most = max(
            len(covering_nodes(run, shards))
            for run in micro_batch_ranges(shards, world.size, num_own=own, rank=world.rank)
        )
        share = (world.size - 1) / world.size
        return (
            f"exact: {shards} logical shards per update, each with a separate gradient; a rank sends up to "
            f"{(most + 1) * share * numbers / 1e6:.3g} MB per update (DDP: {2 * share * numbers / 1e6:.3g} MB)"
        )

    def metric_source(self) -> Callable[[Mapping[str, float]], dict[str, float]]:
        """Return a metric source of `exact_s`: seconds per update of summing gradients, on the slowest rank."""
        return self._measure

    def _measure(self, record: Mapping[str, float]) -> dict[str, float]:
        longest_s = max(self._world.all_gather_object(self._combining_s / max(self._num_combined, 1)))
        self._combining_s, self._num_combined = 0.0, 0
        return {"exact_s": longest_s}

    def __call__(self, batch: GlobalBatch) -> str | None:
        """Make the update; afterwards all ranks have the same random state until the next one."""
        with deterministic_mode(self._ctx.device):
            rejection = super().__call__(batch)
        self._seed_between_updates()
        return rejection

    def complete(self) -> str | None:
        """Make the update from the accumulated gradients; afterwards all ranks have the same random state."""
        rejection = super().complete()
        self._seed_between_updates()
        return rejection

    def _seed_between_updates(self) -> None:
        seed_for(self._config.seed, "between updates", self._ctx.progress.step, self._attempts())

    def step(self, optimizer: Optimizer) -> torch.Tensor | None:
        """Not supported: an optimizer can only step after the gradients of all parts are summed.

        Raises:
            StepError: always.
        """
        raise StepError(
            "training_step called self.step(optimizer), but with exact=True an optimizer can only step after the "
            "gradients of all parts have been summed: return the loss, or remove exact"
        )

    @property
    def should_log(self) -> bool:
        """Whether to log a number now: inside a part on its rank, otherwise only on rank 0, so that it counts once."""
        return self._inside_part or self._world.is_main

    def _attempts(self) -> int:
        return self._guard.skipped + self._guard.retried

    def _prepare(self, batch: GlobalBatch) -> None:
        self._inside_part = False
        super()._prepare(batch)

    def _each_micro_batch(self) -> Generator[tuple[Any, int], None, None]:
        batch, callbacks, progress = self._batch, self._callbacks, self._ctx.progress
        self._begin_attempt()
        self._ranges = self._rank_ranges(batch)
        num_parts, first, before = self._ranges[-1].stop, progress.micro_batches, self._tensor_versions()
        may_miss = self._config.parallel.find_unused_parameters
        self._gradients = GradientTree(_trainable(self._optimizers), num_parts, may_miss=may_miss)
        for i, part in enumerate(self._ranges[self._world.rank]):
            if not batch.num_samples[i]:
                self._gradients.add_empty(part)
                self._outputs.append({})
                continue
            seed_for(self._config.seed, "part", progress.step, self._attempts(), part)
            micro_batch, batch_idx = clone_batch(self._micro_batches[i]), first + part
            self._activity.begin_batch("forward")
            if self._steps.overrides_prepare_batch:
                micro_batch = self._steps.prepare_batch(micro_batch)
            self.weight = self._current_weights[i]
            callbacks.on_batch_start(micro_batch, batch_idx)
            self.is_last_micro_batch = part == num_parts - 1
            self._loss_scale, self._micro_batch = self._loss_scales_now[i], i
            self._returned, self._called_backward = {}, False
            self._inside_part = True
            yield micro_batch, batch_idx
            self._inside_part = False
            self._gradients.add(part)
            self._outputs.append(self._returned)
            callbacks.on_batch_end(self._returned, micro_batch, batch_idx)
            self.weight = 1.0
        progress.micro_batches, self.is_last_micro_batch = first + num_parts, True
        self._check_unchanged(before)

    def _step_accumulated(self) -> None:
        self._activity.enter("optimizer")
        began_s = time.perf_counter()
        self._gradients.combine(self._world, self._ranges)
        self._combining_s += time.perf_counter() - began_s
        self._num_combined += 1
        self._step(self._optimizers)

    def _loss_scales(self, batch: GlobalBatch, weights: Sequence[LossWeight]) -> Sequence[LossWeight]:
        if not self._steps.overrides_loss_weight:
            assert batch.global_num_samples is not None
            return [weight / batch.global_num_samples for weight in weights]
        rank_ranges = self._rank_ranges(batch)
        device, own = self._ctx.device, rank_ranges[self._world.rank]
        # Weights may be fractions, so they need a fixed order of addition too; adding zeros rounds nothing.
        weight_P = torch.zeros(rank_ranges[-1].stop, dtype=torch.float64, device=device)
        weight_P[own.start : own.stop] = torch.stack(
            [torch.as_tensor(weight, dtype=torch.float64, device=device).reshape(()) for weight in weights]
        )
        factor = (1 / self._world.all_reduce_sum(weight_P).sum().clamp(min=1e-12)).float()
        return [weight * factor for weight in weights]

    def _rank_ranges(self, batch: GlobalBatch) -> list[range]:
        """Return the parts of each rank: the same number of every logical shard."""
        world = self._world
        return micro_batch_ranges(self._num_shards, world.size, num_own=len(batch.micro_batches), rank=world.rank)

    def _tensor_versions(self) -> list[tuple[int, int | None]]:
        """Return the identity and version of each tensor, which change if it is replaced or modified in place."""
        models = self._models.values()
        return [
            (id(tensor), version_of(tensor))
            for model in models
            for each in (model.parameters(), model.buffers())
            for tensor in each
        ]

    def _check_unchanged(self, before: list[tuple[int, int | None]]) -> None:
        """Check that the step changed no parameter or buffer, which other ranks would not see.

        Raises:
            StepError: the step changed some; the message names them.
        """
        if (now := self._tensor_versions()) == before:
            return
        names = {
            id(tensor): f"{model}.{name}"
            for model, module in self._models.items()
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
        }
        changed = [names[of] for of, version in now if (of, version) not in before]
        raise StepError(
            f"training_step changed {', '.join(changed[:8]) or 'the tensors of a model'}, which exact=True does not "
            "support: each rank would change only its copy, in the order of its parts. Change it in on_step_end, "
            "from values that are equal on every rank, or remove exact"
        )


def _trainable(optimizers: Sequence[Optimizer]) -> list[torch.Tensor]:
    each = (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    return list(dict.fromkeys(p for p in each if p.requires_grad))
