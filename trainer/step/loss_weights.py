"""Weights of micro-batches, and the factors by which their losses are multiplied."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..data.protocols import GlobalBatch
from ..distributed.world import World
from ..errors import StepError
from ..loop.context import RunContext
from ..loop.steps import LossWeight, Steps


def loss_weights(
    ctx: RunContext, steps: Steps, batch: GlobalBatch, micro_batches: Sequence[Any]
) -> Sequence[LossWeight]:
    """Return the weight of each of this rank's micro-batches: what `loss_weight` returns, or the number of samples.

    Raises:
        StepError: `loss_weight` returned a negative or non-finite number.
    """
    if not steps.overrides_loss_weight:
        return batch.num_samples
    weights: list[LossWeight] = []
    for micro_batch, counts in zip(micro_batches, batch.num_samples, strict=True):
        with ctx.divided_sequences(steps, micro_batch):
            weight = steps.loss_weight(micro_batch) if counts else 0.0
        if isinstance(weight, (int, float)) and not 0 <= weight < math.inf:
            raise StepError(f"loss_weight of {ctx.name} returned {weight}; it must be >= 0")
        weights.append(weight)
    return weights


def scales_of_mean(weights: Sequence[LossWeight], world: World, device: torch.device) -> Sequence[LossWeight]:
    """Return the factor of each micro-batch's loss: its weight * ranks / the sum of the weights of all ranks.

    Every rank must call this. No value is read back and no copy blocks, since the device may be far behind.
    """
    own: LossWeight = sum(weights, start=0.0)
    if world.size == 1 and not isinstance(own, torch.Tensor):
        return [weight / own if own else 0.0 for weight in weights]
    # float64 counts any number of tokens exactly.
    if isinstance(own, torch.Tensor):
        total = own.to(device, torch.float64, non_blocking=True, copy=True)
    else:
        total = torch.full((), own, dtype=torch.float64, device=device)
    world.all_reduce_sum(total)
    factor = (world.size / total.clamp(min=1e-12)).float()
    return [weight * factor for weight in weights]
