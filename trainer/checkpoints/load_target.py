"""The tensors into which a checkpoint or captured state is read, and the call that loads it into a part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch.distributed.tensor import DTensor

from ..data.protocols import Stateful
from ..errors import CheckpointError
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


def target_allocator(part: str, owner: Stateful) -> Callable[[str, torch.Size, torch.dtype], torch.Tensor]:
    """Return a function from name, size and saved dtype of a part's tensor to the tensor into which it is read.

    Only a part itself may provide the live tensor: two parts may share one, such as an average that still equals its
    model.
    """
    # Asked once: `isinstance` of a protocol takes longer than the rest.
    target_of = owner.load_target if isinstance(owner, SupportsLoadTarget) else None
    live = {} if target_of else {"/".join((part, *path)): each for path, each in iter_tensors(owner.state_dict())}

    def allocate(name: str, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        if target_of is not None:
            placed = target_of(tuple(name[len(part) + 1 :].split("/")), size, dtype)
            if placed is not None:
                return placed
        like = live.get(name)
        if isinstance(like, DTensor) and like.shape == size:
            return torch.empty_like(like, dtype=dtype, requires_grad=False)
        return torch.empty(size, dtype=dtype)

    return allocate


def load_part(part: str, load: Callable[[Any], object], state: Any) -> None:
    """Call the `load_state_dict` of a part.

    Raises:
        CheckpointError: it failed; the message names the part, and that error is the cause.
    """
    try:
        load(state)
    except Exception as error:
        raise CheckpointError(f"part {part!r} cannot load its state: {type(error).__name__}: {error}") from error
