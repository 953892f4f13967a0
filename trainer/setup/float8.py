"""Linear layers with float8 matrix products in training, by torchao, on supported hardware."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

import torch
from torch import nn

from ..errors import ConfigError

# torch._scaled_mm needs both sizes of a matrix to be multiples of this.
_MULTIPLE = 16
# Compute capability of Ada, the first generation with float8 tensor cores.
_NEEDED = (8, 9)


def check_float8(device: torch.device) -> None:
    """Check that float8 is supported here.

    Raises:
        ConfigError: there is no GPU, it is too old, or torchao is not installed.
    """
    if device.type != "cuda":
        raise ConfigError(f"float8 needs an NVIDIA GPU, but the model trains on the {device.type}: leave it out")
    if (there := torch.cuda.get_device_capability(device)) < _NEEDED:
        raise ConfigError(
            f"float8 needs a GPU of compute capability {_NEEDED[0]}.{_NEEDED[1]} or above, but "
            f"{torch.cuda.get_device_name(device)} has {there[0]}.{there[1]}: leave it out"
        )
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError("float8 needs the package torchao, which is not installed: pip install torchao")


def convert_to_float8(models: Mapping[str, nn.Module]) -> None:
    """Convert suitable linear layers to float8 in place; weights and names do not change.

    Call it after `check_float8`, and before models are wrapped: layers inside wrappers are not found.

    Raises:
        ConfigError: there is no such layer.
    """
    from torchao.float8 import convert_to_float8_training

    for module in models.values():
        convert_to_float8_training(module, module_filter_fn=lambda each, _: fits_float8(each))
    if not any(type(each).__name__ == "Float8Linear" for module in models.values() for each in module.modules()):
        raise ConfigError(
            f"float8 needs trainable nn.Linear layers whose input and output sizes are multiples of {_MULTIPLE}, but "
            f"there are none inside {', '.join(models)}: leave it out"
        )


def fits_float8(module: nn.Module) -> bool:
    """Return whether a module is a trainable linear layer with sizes that float8 products support."""
    return (
        isinstance(module, nn.Linear)
        and module.weight.requires_grad
        and module.in_features % _MULTIPLE == 0
        and module.out_features % _MULTIPLE == 0
    )
