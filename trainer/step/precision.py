"""Precision of weights and forward passes, and the loss scaler for float16."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from ..config import Precision
from ..data.protocols import Stateful
from ..distributed.world import World
from ..errors import ConfigError

_UNCHANGED = nullcontext()


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return a context for one forward pass: PyTorch's autocast, except for "fp32".

    With "bf16-true", whose weights are bfloat16, autocast casts the inputs, and keeps losses and norms in float32.
    """
    if precision == "fp32":
        return _UNCHANGED
    return torch.autocast(device.type, torch.float16 if precision == "fp16" else torch.bfloat16)


def without_autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return a context that disables autocast, for backward and optimizer steps inside a forward pass."""
    return _UNCHANGED if precision == "fp32" else torch.autocast(device.type, enabled=False)


def cast_weights(model: nn.Module, precision: Precision) -> None:
    """Cast a model's floating-point parameters to bfloat16 in place, if the precision is "bf16-true".

    Buffers keep their dtype: rotary frequencies and position tables would be wrong in bfloat16, and running means would
    hardly move. So do the weights of norms with running means, which must have the dtype of these.
    """
    if precision != "bf16-true":
        return
    buffers = [(module, *each) for module in model.modules() for each in module.named_buffers(recurse=False)]
    norms = nn.ModuleList(each for each in model.modules() if getattr(each, "running_mean", None) is not None)
    exact = [parameter.detach().clone() for parameter in norms.parameters()]
    model.bfloat16()
    norms.float()
    with torch.no_grad():
        for parameter, values in zip(norms.parameters(), exact, strict=True):
            parameter.copy_(values)
    for module, name, buffer in buffers:
        setattr(module, name, buffer)


class ScalesLoss(Stateful, Protocol):
    """A factor of the loss for float16, which keeps small gradients from underflowing.

    Every rank has one, and all must have the same scale: `update` is told the same on every rank.

    Attributes:
        scale: the factor of the next losses, greater than 0. Gradients are divided by it before they are used.
    """

    scale: float

    def update(self, *, overflowed: bool) -> None:
        """Choose the next scale, after an update that was applied, or skipped because its gradient is not finite."""


def loss_scaler(
    precision: Precision, optimizers: Sequence[Optimizer], configure: Callable[[], ScalesLoss], world: World
) -> ScalesLoss | None:
    """Return the loss scaler if the precision is "fp16", else None. Every rank must call this.

    Raises:
        ConfigError: the weights are float16, so that their gradients cannot be unscaled; or `configure` returns no loss
            scaler, or another scale on some rank.
    """
    if precision != "fp16":
        return None
    held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    if half := sum(parameter.dtype == torch.float16 for parameter in held):
        raise ConfigError(
            f"precision='fp16' needs float32 weights, but {half} of the {len(held)} weights are float16: load the "
            "model in float32, or use precision='bf16-true'"
        )
    scaler = configure()
    _check_scaler(scaler)
    scales = world.all_gather_object(scaler.scale)
    if len(set(scales)) > 1:
        raise ConfigError(describe_unequal_scales(scales))
    return scaler


def _check_scaler(scaler: Any) -> None:
    if isinstance(scaler, torch.amp.GradScaler):
        raise ConfigError(
            f"configure_loss_scaler() returned a {type(scaler).__name__}, which looks at the gradients of one rank: "
            "return headway.trainer.LossScaler(init_scale, growth_factor=..., backoff_factor=..., growth_interval=...)"
        )
    lacks = [name for name in ("update", "state_dict", "load_state_dict") if not callable(getattr(scaler, name, None))]
    scale = getattr(scaler, "scale", None)
    if not isinstance(scale, (int, float)) or not 0 < scale < math.inf:
        lacks = [f"a scale > 0 (it is {scale!r:.40})", *lacks]
    if lacks:
        raise ConfigError(
            f"configure_loss_scaler() returned a {type(scaler).__name__} without {', '.join(lacks)}: return a "
            "headway.trainer.LossScaler, or an object with scale, update(overflowed=...), state_dict() and "
            "load_state_dict(state)"
        )


def describe_unequal_scales(scales: Sequence[float]) -> str:
    """Return the message of an error about ranks with unequal loss scales."""
    each = ", ".join(f"rank {rank}: {scale:g}" for rank, scale in enumerate(scales))
    return (
        f"the loss scales of the ranks differ ({each}), and so would their gradients: the object that "
        "configure_loss_scaler() returns must do the same on every rank"
    )


class LossScaler:
    """Scales the loss, so that small gradients do not underflow in float16.

    An update with a non-finite gradient lowers the scale; a number of consecutive finite ones raises it. Unlike
    `torch.amp.GradScaler`, which checks this rank's gradients, it relies on the norm of the whole gradient, which is
    equal on every rank, also for sharded gradients.

    Args:
        init_scale: the first scale, at least 1.
        growth_factor: the scale is multiplied by this after `growth_interval` consecutive finite updates; at least 1.
        backoff_factor: and by this after a non-finite one, down to 1; greater than 0 and at most 1.
        growth_interval: consecutive finite updates before the scale grows.

    Attributes:
        scale: factor of the loss, at least 1.
        good_updates: consecutive updates with a finite gradient at this scale.

    Raises:
        ConfigError: an argument is out of its range.

    Example:
        >>> scaler = LossScaler(1024.0, growth_interval=500)
        >>> scaler.update(overflowed=True)
        >>> scaler.scale
        512.0
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        for name, value, fits, allowed in (
            ("init_scale", init_scale, 1 <= init_scale < math.inf, ">= 1"),
            ("growth_factor", growth_factor, 1 <= growth_factor < math.inf, ">= 1"),
            ("backoff_factor", backoff_factor, 0 < backoff_factor <= 1, "> 0 and <= 1"),
            ("growth_interval", growth_interval, growth_interval >= 1, ">= 1"),
        ):
            if not fits:
                raise ConfigError(f"{name} must be {allowed}, got {value}")
        self.scale: float = float(init_scale)
        self.good_updates: int = 0
        self._growth_factor, self._backoff_factor = growth_factor, backoff_factor
        self._growth_interval = growth_interval

    def update(self, *, overflowed: bool) -> None:
        """Lower the scale after a non-finite gradient; count a finite one, and raise the scale if due."""
        if overflowed:
            self.scale, self.good_updates = max(self.scale * self._backoff_factor, 1.0), 0
            return
        self.good_updates += 1
        if self.good_updates >= self._growth_interval:
            self.scale, self.good_updates = self.scale * self._growth_factor, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and its counter."""
        return {"scale": self.scale, "good_updates": self.good_updates}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Restore the scale and its counter."""
        self.scale, self.good_updates = state["scale"], state["good_updates"]
