"""Conversions of sharded tensors, and access to the module inside its wrappers."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from ..private_torch import checkpointed_module, chunk_of, compiled_module


def is_sharded(model: nn.Module) -> bool:
    """Whether a model has sharded parameters, from `configure_models` or from `shard`."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor, or the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def to_full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor gathered from all ranks, or the tensor itself if not sharded. Every rank must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: DTensor) -> tuple[slice, ...]:
    """Return the part of a tensor that this rank holds, as an index into the whole."""
    return tuple(slice(first, first + size) for first, size in zip(*chunk_of(tensor), strict=True))


def to_dtensor_like(local: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return `local`, this rank's shard, as a DTensor like `tensor`; unchanged if `tensor` is not sharded."""
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def strip_wrappers(module: nn.Module) -> nn.Module:
    """Remove any nesting of DDP, activation checkpointing and compile, which checkpoints ignore."""
    while (inner := _inside(module)) is not None:
        module = inner
    return module


def _inside(module: nn.Module) -> nn.Module | None:
    if isinstance(module, DistributedDataParallel):
        return module.module  # type: ignore[no-any-return]
    # Not by `or`: the truth value of a compiled module is that of its length, which few have.
    inner = checkpointed_module(module)
    return compiled_module(module) if inner is None else inner


def unwrap(module: nn.Module) -> nn.Module:
    """Return the user's module: like `strip_wrappers`, and also without `AveragedModel` and FSDP1.

    Checkpoints keep `AveragedModel`, which has its own state, so they use `strip_wrappers`.
    """
    while (inner := strip_wrappers(module)) is not module or isinstance(
        inner, (AveragedModel, FullyShardedDataParallel)
    ):
        module = inner.module if isinstance(inner, (AveragedModel, FullyShardedDataParallel)) else inner
    return module
