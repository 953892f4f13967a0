"""In which number formats weights are kept and forward passes compute, and the scale of the loss that float16 needs."""

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
    """Returns a context for one forward pass: nothing for "fp32", PyTorch's autocast for the others.

    Also for "bf16-true", whose weights are bfloat16 already: it casts what comes from the data, and keeps losses and
    norms in float32.
    """
    if precision == "fp32":
        return _UNCHANGED
    return torch.autocast(device.type, torch.float16 if precision == "fp16" else torch.bfloat16)


def without_autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Returns a context for what a step does besides its forward passes: backward, and the optimizer's step."""
    return _UNCHANGED if precision == "fp32" else torch.autocast(device.type, enabled=False)


def cast_weights(model: nn.Module, precision: Precision) -> None:
    """Makes a model's floating-point parameters and buffers bfloat16, in place, where the precision is "bf16-true"."""
    if precision == "bf16-true":
        model.bfloat16()


def loss_scaler(precision: Precision, optimizers: Sequence[Optimizer]) -> LossScaler | None:
    """Returns a scaler where the precision is "fp16", else None.

    Raises:
        ConfigError: the weights are float16 themselves, whose gradients cannot be unscaled.
    """
    if precision != "fp16":
        return None
    held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    if half := sum(parameter.dtype == torch.float16 for parameter in held):
        raise ConfigError(
            f"precision 'fp16' keeps weights in float32 and computes in float16, and {half} of the {len(held)} weights "
            "are float16 themselves, which nothing trains well: load the model in float32, or take 'bf16-true'"
        )
    return LossScaler()


class LossScaler:
    """Multiplies the loss, so that small gradients do not become zero in float16, and divides the gradients again.

    The scale is halved by an update whose gradient is not finite, and doubled after 2000 in a row that were. It never
    decides what is finite: the norm of the whole gradient does, which is the same on every rank and for sharded
    gradients. `torch.amp.GradScaler` looks at this rank's gradients only.

    Attributes:
        scale: what the loss is multiplied by, at least 1.
        good_updates: how many in a row had a finite gradient at this scale.
    """

    def __init__(self) -> None:
        self.scale = _FIRST_SCALE
        self.good_updates = 0

    @property
    def may_have_overflowed(self) -> bool:
        """Whether a gradient that is not finite may have overflowed because of the scale."""
        return self.scale > 1.0

    def unscale(self, gradients: list[torch.Tensor]) -> None:
        """Divides gradients by the scale, in place."""
        torch._foreach_mul_(gradients, 1.0 / self.scale)

    def grow(self) -> None:
        """Takes note of an update that was applied."""
        self.good_updates += 1
        if self.good_updates >= _GROWS_AFTER:
            self.scale, self.good_updates = self.scale * 2, 0

    def shrink(self) -> None:
        """Takes note of an update whose gradient was not finite."""
        self.scale, self.good_updates = max(self.scale / 2, 1.0), 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the scale, and how long it has held."""
        return {"scale": self.scale, "good_updates": self.good_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes them over."""
        self.scale, self.good_updates = state["scale"], state["good_updates"]
