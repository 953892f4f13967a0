"""In which number format the forward pass computes; the weights stay as they are."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from .config import Precision


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Returns a context for one forward pass: nothing for "fp32", PyTorch's autocast for "bf16"."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)
