"""Precision of weights and forward passes, and the loss scaler for float16."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..config import Precision
from ..errors import ConfigError

_FIRST_SCALE = 2.0**16
_GROWS_AFTER = 2000
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


def loss_scaler(precision: Precision, optimizers: Sequence[Optimizer]) -> LossScaler | None:
    """Return a loss scaler if the precision is "fp16", else None.

    Raises:
        ConfigError: the weights are float16, so that their gradients cannot be unscaled.
    """
    if precision != "fp16":
        return None
    held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    if half := sum(parameter.dtype == torch.float16 for parameter in held):
        raise ConfigError(
            f"precision='fp16' needs float32 weights, but {half} of the {len(held)} weights are float16: load the "
            "model in float32, or use precision='bf16-true'"
        )
    return LossScaler()


class LossScaler:
    """Scales the loss, so that small gradients do not underflow in float16, and unscales the gradients.

    An update with a non-finite gradient halves the scale; 2000 consecutive finite ones double it. Unlike
    `torch.amp.GradScaler`, which checks this rank's gradients, it relies on the norm of the whole gradient, which is
    equal on every rank, also for sharded gradients.

    Attributes:
        scale: factor of the loss, at least 1.
        good_updates: consecutive updates with a finite gradient at this scale.
    """

    def __init__(self) -> None:
        self.scale = _FIRST_SCALE
        self.good_updates = 0

    @property
    def may_have_overflowed(self) -> bool:
        """Whether the scale may be the cause of a non-finite gradient."""
        return self.scale > 1.0

    def unscale(self, gradients: list[torch.Tensor]) -> None:
        """Divide gradients by the scale, in place."""
        torch._foreach_mul_(gradients, 1.0 / self.scale)

    def grow(self) -> None:
        """Count an applied update, and double the scale if due."""
        self.good_updates += 1
        if self.good_updates >= _GROWS_AFTER:
            self.scale, self.good_updates = self.scale * 2, 0

    def shrink(self) -> None:
        """Halve the scale, after a non-finite gradient."""
        self.scale, self.good_updates = max(self.scale / 2, 1.0), 0

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and its counter."""
        return {"scale": self.scale, "good_updates": self.good_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scale and its counter."""
        self.scale, self.good_updates = state["scale"], state["good_updates"]
