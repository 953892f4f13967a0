"""The tensors into which a checkpoint or captured state is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch.distributed.tensor import DTensor

from ..data.protocols import Stateful
from .format.plain_values import iter_tensors


@runtime_checkable
class SupportsLoadTarget(Protocol):
    """A part that provides tensors for a checkpoint to be read into before `load_state_dict`."""

    def load_target(self, path: tuple[str, ...], size: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the tensor to fill, which may be sharded or live; None to let the store allocate one.

        Args:
            path: keys of the tensor in the part's nested state.
            size: size of the full tensor, over all ranks.
            dtype: saved dtype of the tensor.
        """


def live_tensors(part: str, owner: Stateful) -> dict[str, torch.Tensor]:
    """Return the tensors of a part's state by name, as patterns for `allocate_target`; none if it provides targets."""
    if isinstance(owner, SupportsLoadTarget):
        return {}
    return {"/".join((part, *path)): tensor for path, tensor in iter_tensors(owner.state_dict())}


def allocate_target(
    part: str, owner: object, live: Mapping[str, torch.Tensor], name: str, size: torch.Size, dtype: torch.dtype
) -> torch.Tensor:
    """Return the tensor into which the tensor `name` of a checkpoint is read.

    Only a part itself may provide the live tensor: two parts may share one, such as an average that still equals its
    model.
    """
    if isinstance(owner, SupportsLoadTarget):
        placed = owner.load_target(tuple(name[len(part) + 1 :].split("/")), size, dtype)
        if placed is not None:
            return placed
    like = live.get(name)
    if isinstance(like, DTensor) and like.shape == size:
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    return torch.empty(size, dtype=dtype)
