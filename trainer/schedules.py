"""Learning rate schedules over a run: a warm-up, then constant, linear, cosine, or stable with a decay at the end.

    scheduler = schedules.cosine(optimizer, total_steps=self.total_steps, warmup_steps=100)

A schedule multiplies the learning rate of each parameter group by a factor that depends only on the step. Update k of a
warm-up of n steps has k/n of the peak, so no update has a rate of zero. A decay starts with the update after the
warm-up, and would reach its minimum one update after the last.

A resumed run follows the schedule that it is given now, not the saved one: extended from 10 steps to 20, it continues
on the curve over 20 steps, with a warning. A fixed `total_steps` keeps the old curve, which then stays at its minimum.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from .errors import ConfigError
from .private_torch import set_last_lr


def constant(
    optimizer: Optimizer, *, total_steps: int | None = None, warmup_steps: int = 0, warmup_fraction: float = 0.0
) -> LambdaLR:
    """Stay at the peak after the warm-up; arguments as for `cosine`, `total_steps` only with `warmup_fraction`."""
    warmup = _warmup(total_steps, warmup_steps, warmup_fraction, needs_end=False)
    return _schedule(_stay, optimizer, total_steps, warmup, minimum=1.0)


def linear(
    optimizer: Optimizer,
    *,
    total_steps: int | None,
    warmup_steps: int = 0,
    warmup_fraction: float = 0.0,
    minimum: float = 0.0,
) -> LambdaLR:
    """Decay linearly after the warm-up; arguments as for `cosine`."""
    warmup = _warmup(total_steps, warmup_steps, warmup_fraction, needs_end=True)
    return _schedule(_fall, optimizer, total_steps, warmup, minimum)


def cosine(
    optimizer: Optimizer,
    *,
    total_steps: int | None,
    warmup_steps: int = 0,
    warmup_fraction: float = 0.0,
    minimum: float = 0.0,
) -> LambdaLR:
    """Decay along half a cosine after the warm-up.

    Args:
        optimizer: the learning rates of its groups are the peaks.
        total_steps: updates of the whole run, `self.total_steps` in `configure_optimizers`; epochs, if the trainer has
            `scheduler_interval = "epoch"`.
        warmup_steps: updates of the warm-up.
        warmup_fraction: the same as a fraction of `total_steps`; give one of the two.
        minimum: rate at the end, as a fraction of the peak.

    Returns:
        A scheduler to step after every update, as the trainer does with schedulers that are its attributes.

    Raises:
        ConfigError: the length of the run is unknown, or an argument is invalid.

    Source: SGDR (Loshchilov and Hutter, arXiv:1608.03983), without its restarts.

    Example:
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> scheduler = schedules.cosine(optimizer, total_steps=1000, warmup_fraction=0.05, minimum=0.1)
    """
    warmup = _warmup(total_steps, warmup_steps, warmup_fraction, needs_end=True)
    return _schedule(_fall_as_cosine, optimizer, total_steps, warmup, minimum)


def wsd(
    optimizer: Optimizer,
    *,
    total_steps: int | None,
    warmup_steps: int = 0,
    warmup_fraction: float = 0.0,
    decay_fraction: float = 0.2,
    minimum: float = 0.0,
) -> LambdaLR:
    """Warm up, stay at the peak, and decay linearly at the end, so that the run is easily extended.

    Args:
        optimizer: the learning rates of its groups are the peaks.
        total_steps: updates of the whole run, as for `cosine`.
        warmup_steps: updates of the warm-up.
        warmup_fraction: the same as a fraction of `total_steps`; give one of the two.
        decay_fraction: length of the decay, as a fraction of `total_steps`.
        minimum: rate at the end, as a fraction of the peak.

    Returns:
        A scheduler to step after every update.

    Raises:
        ConfigError: the length of the run is unknown, or warm-up and decay overlap.

    Source: MiniCPM (Hu et al., arXiv:2404.06395, section 4); the decay is linear as in Hägele et al., arXiv:2405.18392.
    """
    if not 0 < decay_fraction <= 1:
        raise ConfigError(f"decay_fraction must be > 0 and <= 1, got {decay_fraction}")
    warmup = _warmup(total_steps, warmup_steps, warmup_fraction, needs_end=True)
    total = total_steps or 0
    if warmup + decay_fraction * total > total:
        raise ConfigError(
            f"a warm-up of {warmup} steps and decay_fraction={decay_fraction:g} do not fit into total_steps={total}: "
            "lower one of them"
        )
    height = partial(_fall_at_end, decay_fraction * total / (total - warmup))
    return _schedule(height, optimizer, total_steps, warmup, minimum)


# The height between minimum (0) and peak (1), as a function of the completed fraction after the warm-up.
Height = Callable[[float], float]


class _Schedule(LambdaLR):
    """A LambdaLR that keeps the curve of its arguments when it loads a checkpoint of another one."""

    def __init__(self, optimizer: Optimizer, factor: Callable[[int], float], total_steps: int | None) -> None:
        self.total_steps = total_steps
        super().__init__(optimizer, factor)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        before = state_dict.get("total_steps", self.total_steps)
        super().load_state_dict({**state_dict, "total_steps": self.total_steps})
        if before == self.total_steps:
            return
        # The restored optimizer has the rate of the old curve, and steps before this scheduler does.
        rates = [base * self.lr_lambdas[0](self.last_epoch) for base in self.base_lrs]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        set_last_lr(self, rates)
        warnings.warn(
            f"the learning rate was scheduled over {before} steps and now is over {self.total_steps}: continuing with "
            f"{', '.join(f'{float(rate):.3g}' for rate in rates)}, the value of the new curve at step "
            f"{self.last_epoch}. Pass the schedule total_steps={before} to keep the old one",
            stacklevel=2,
        )


def _schedule(height: Height, optimizer: Optimizer, total_steps: int | None, warmup: int, minimum: float) -> LambdaLR:
    if not 0 <= minimum <= 1:
        raise ConfigError(f"minimum must be a fraction of the peak, from 0 to 1, got {minimum}")
    return _Schedule(optimizer, partial(_factor, height, warmup, total_steps, minimum), total_steps)


def _warmup(total_steps: int | None, warmup_steps: int, warmup_fraction: float, *, needs_end: bool) -> int:
    """Check the arguments and return the updates of the warm-up."""
    if warmup_steps and warmup_fraction:
        raise ConfigError(f"give warmup_steps or warmup_fraction, not both ({warmup_steps} and {warmup_fraction})")
    if not isinstance(warmup_steps, int) or warmup_steps < 0:
        raise ConfigError(
            f"warmup_steps must be an integer >= 0, got {warmup_steps}; for a fraction use warmup_fraction"
        )
    if not 0 <= warmup_fraction < 1:
        raise ConfigError(f"warmup_fraction must be >= 0 and < 1, got {warmup_fraction}")
    if not needs_end and not warmup_fraction:
        return warmup_steps
    if total_steps is None:
        raise ConfigError(
            "total_steps is None, since the length of the run is unknown: set max_steps, or steps_per_epoch with "
            "max_epochs, in the config; or pass a number"
        )
    if total_steps < 1:
        raise ConfigError(f"total_steps must be an integer >= 1, got {total_steps}")
    warmup = warmup_steps or round(warmup_fraction * total_steps)
    if needs_end and warmup >= total_steps:
        raise ConfigError(f"a warm-up of {warmup} steps must be shorter than total_steps={total_steps}")
    return warmup


def _factor(height: Height, warmup: int, total_steps: int | None, minimum: float, step: int) -> float:
    """Return the factor for the update that comes after `step` updates."""
    if step < warmup:
        return (step + 1) / warmup
    if total_steps is None or total_steps <= warmup:
        return 1.0
    # Beyond total_steps the rate stays at its end.
    return minimum + (1 - minimum) * height((min(step, total_steps) - warmup) / (total_steps - warmup))


def _stay(done: float) -> float:
    return 1.0


def _fall(done: float) -> float:
    return 1 - done


def _fall_as_cosine(done: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * done))


def _fall_at_end(share: float, done: float) -> float:
    return min(1.0, (1 - done) / share)
