"""Sharded tensors and wrapped modules as what they hold: this rank's part, the full tensor, the module inside."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel


def is_sharded(model: nn.Module) -> bool:
    """Whether a model is spread over ranks already: by its author, in `configure_models`, or by `shard`."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a tensor: the tensor itself unless it is sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def to_full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with its parts from all ranks put together. Every rank must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def to_dtensor_like(part: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of something as one with the other ranks' parts, cut as another tensor is."""
    if not isinstance(tensor, DTensor):
        return part
    return DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def strip_wrappers(module: nn.Module) -> nn.Module:
    """Takes off what a module trains in: any nesting of DDP, activation checkpointing and compile."""
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif isinstance(module, CheckpointWrapper):
            module = module._checkpoint_wrapped_module
        elif isinstance(module, torch._dynamo.OptimizedModule):
            module = module._orig_mod
        else:
            return module


def unwrap(module: nn.Module) -> nn.Module:
    """Returns the module that the user wrote, inside any nesting of wrappers, averages and FSDP1 among them.

    An average has state of its own, so a checkpoint holds it as it is: what `strip_wrappers` returns.
    """
    while (inner := strip_wrappers(module)) is not module or isinstance(
        inner, (AveragedModel, FullyShardedDataParallel)
    ):
        module = inner.module if isinstance(inner, (AveragedModel, FullyShardedDataParallel)) else inner
    return module
