"""Learning rates over a whole run: a warm-up, then constant, linear, cosine, or stable and decaying at the end.

    scheduler = schedules.cosine(optimizer, total_steps=self.total_steps, warmup_steps=100)

Every schedule is a factor on the learning rate of each parameter group, a function of the step and of nothing else. A
warm-up of n steps gives update k of it k/n of the peak, so no update is lost to a rate of zero. Whatever falls does so
from the update after the warm-up on, and would reach its minimum one update after the last.

A resumed run follows the schedule that it is given now, not the one that was saved: extended from 10 steps to 20, it
goes on where the curve over 20 steps stands, with a warning. A fixed `total_steps` keeps the old curve, which then
stays at its end.
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


def constant(
    optimizer: Optimizer, *, total_steps: int | None = None, warmup_steps: int = 0, warmup_fraction: float = 0.0
) -> LambdaLR:
    """Keeps the peak after the warm-up; takes the arguments of `cosine`, and needs `total_steps` for a share only."""
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
    """Falls in a straight line after the warm-up; takes the arguments of `cosine`."""
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
    """Falls along half a cosine after the warm-up.

    Args:
        optimizer: the learning rates of its groups are the peaks.
        total_steps: updates of the whole run, which in `configure_optimizers` is `self.total_steps`. Where the trainer
            has `scheduler_interval = "epoch"`, epochs.
        warmup_steps: updates that rise to the peak.
        warmup_fraction: the same as a share of `total_steps`; give one of the two.
        minimum: what is left at the end, as a share of the peak.

    Returns:
        A scheduler to step after every update, as the trainer does with one that is an attribute.

    Raises:
        ConfigError: nobody knows the length of the run, or the numbers make no curve.

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
    """Warms up, stays at the peak, and decays in a straight line at the end: a run of this kind is easily extended.

    Args:
        optimizer: the learning rates of its groups are the peaks.
        total_steps: updates of the whole run, as for `cosine`.
        warmup_steps: updates that rise to the peak.
        warmup_fraction: the same as a share of `total_steps`; give one of the two.
        decay_fraction: the share of `total_steps` at the end that decays.
        minimum: what is left at the end, as a share of the peak.

    Returns:
        A scheduler to step after every update.

    Raises:
        ConfigError: nobody knows the length of the run, or warm-up and decay overlap.

    Source: MiniCPM (Hu et al., arXiv:2404.06395, section 4); the decay is linear as in Hägele et al., arXiv:2405.18392.
    """
    if not 0 < decay_fraction <= 1:
        raise ConfigError(f"decay_fraction is above 0 and at most 1, not {decay_fraction}")
    warmup = _warmup(total_steps, warmup_steps, warmup_fraction, needs_end=True)
    total = total_steps or 0
    if warmup + decay_fraction * total > total:
        raise ConfigError(
            f"a warm-up of {warmup} steps and a decay over {decay_fraction:.0%} of {total} do not fit into the run"
        )
    height = partial(_fall_at_end, decay_fraction * total / (total - warmup))
    return _schedule(height, optimizer, total_steps, warmup, minimum)


# How high the rate stands between minimum (0) and peak (1), from the share of what follows the warm-up that is done.
Height = Callable[[float], float]


class _Schedule(LambdaLR):
    """A LambdaLR whose curve is that of its arguments, also after a checkpoint of another curve was loaded."""

    def __init__(self, optimizer: Optimizer, factor: Callable[[int], float], total_steps: int | None) -> None:
        self.total_steps = total_steps
        super().__init__(optimizer, factor)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        before = state_dict.get("total_steps", self.total_steps)
        super().load_state_dict({**state_dict, "total_steps": self.total_steps})
        if before == self.total_steps:
            return
        # The optimizer brought the rate of the old curve along, and the next update comes before the next step here.
        rates = [base * self.lr_lambdas[0](self.last_epoch) for base in self.base_lrs]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = rates
        warnings.warn(
            f"the learning rate was scheduled over {before} steps and now is over {self.total_steps}: it goes on with "
            f"{', '.join(f'{float(rate):.3g}' for rate in rates)}, where the new curve stands at step "
            f"{self.last_epoch}. Give the schedule total_steps={before} to keep the old one",
            stacklevel=2,
        )


def _schedule(height: Height, optimizer: Optimizer, total_steps: int | None, warmup: int, minimum: float) -> LambdaLR:
    if not 0 <= minimum <= 1:
        raise ConfigError(f"minimum is a share of the peak, from 0 to 1, not {minimum}")
    return _Schedule(optimizer, partial(_factor, height, warmup, total_steps, minimum), total_steps)


def _warmup(total_steps: int | None, warmup_steps: int, warmup_fraction: float, *, needs_end: bool) -> int:
    """Returns the updates of the warm-up, when all numbers make sense."""
    if warmup_steps and warmup_fraction:
        raise ConfigError(f"give warmup_steps or warmup_fraction, not both ({warmup_steps} and {warmup_fraction})")
    if not isinstance(warmup_steps, int) or warmup_steps < 0:
        raise ConfigError(f"warmup_steps is a whole number from 0, not {warmup_steps}; warmup_fraction takes a share")
    if not 0 <= warmup_fraction < 1:
        raise ConfigError(f"warmup_fraction is a share of the run, from 0 to below 1, not {warmup_fraction}")
    if not needs_end and not warmup_fraction:
        return warmup_steps
    if total_steps is None:
        raise ConfigError(
            "a schedule over the whole run needs to know its total_steps, and nobody does: set max_steps, or "
            "steps_per_epoch besides max_epochs, in the config; or give a number"
        )
    if total_steps < 1:
        raise ConfigError(f"total_steps is a whole number from 1, not {total_steps}")
    warmup = warmup_steps or round(warmup_fraction * total_steps)
    if needs_end and warmup >= total_steps:
        raise ConfigError(f"a warm-up of {warmup} steps leaves nothing of a run of {total_steps}")
    return warmup


def _factor(height: Height, warmup: int, total_steps: int | None, minimum: float, step: int) -> float:
    """The factor of the update that comes after `step` updates."""
    if step < warmup:
        return (step + 1) / warmup
    if total_steps is None or total_steps <= warmup:
        return 1.0
    # What trains beyond the end stays there.
    return minimum + (1 - minimum) * height((min(step, total_steps) - warmup) / (total_steps - warmup))


def _stay(done: float) -> float:
    return 1.0


def _fall(done: float) -> float:
    return 1 - done


def _fall_as_cosine(done: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * done))


def _fall_at_end(share: float, done: float) -> float:
    return min(1.0, (1 - done) / share)
