"""Linear layers that multiply in float8 while they train, by torchao, on hardware that can."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

import torch
from torch import nn

from ..errors import ConfigError

# torch._scaled_mm wants both sizes of a matrix to be multiples of this.
_MULTIPLE = 16
# Ada, Hopper and what came after them have float8 tensor cores.
_NEEDED = (8, 9)


def check_float8(device: torch.device) -> None:
    """Refuses float8 where it cannot be.

    Raises:
        ConfigError: says what is missing: the GPU, its generation, or the package.
    """
    if device.type != "cuda":
        raise ConfigError(
            f"float8 needs an NVIDIA GPU that can, and the model trains on the {device.type}: leave it out"
        )
    if (there := torch.cuda.get_device_capability(device)) < _NEEDED:
        raise ConfigError(
            f"float8 needs a GPU of compute capability {_NEEDED[0]}.{_NEEDED[1]} or above, and "
            f"{torch.cuda.get_device_name(device)} has {there[0]}.{there[1]}: leave it out"
        )
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError("float8 needs the package torchao, which is not installed: pip install torchao")


def convert_to_float8(models: Mapping[str, nn.Module]) -> None:
    """Replaces the linear layers that can multiply in float8, in place; weights and names stay as they are.

    Call it before anything else is done to the models: what is wrapped is not found. `check_float8` has allowed it.

    Raises:
        ConfigError: there is no such layer.
    """
    from torchao.float8 import convert_to_float8_training

    for module in models.values():
        convert_to_float8_training(module, module_filter_fn=lambda each, _: fits_float8(each))
    if not any(type(each).__name__ == "Float8Linear" for module in models.values() for each in module.modules()):
        raise ConfigError(
            f"float8 found nothing to convert in {', '.join(models)}: it needs nn.Linear layers inside the model that "
            f"are trained, whose input and output sizes are multiples of {_MULTIPLE}"
        )


def fits_float8(module: nn.Module) -> bool:
    """Whether a module is a linear layer that is trained and of a size that float8 products take."""
    return (
        isinstance(module, nn.Linear)
        and module.weight.requires_grad
        and module.in_features % _MULTIPLE == 0
        and module.out_features % _MULTIPLE == 0
    )
