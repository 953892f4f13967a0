"""A copy of the state in host memory, and loading it on the same ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..data.protocols import Stateful
from ..distributed.dtensor import to_local
from ..distributed.world import World
from ..errors import CheckpointError, ResumeError
from .collective_errors import on_all_ranks
from .format.plain_values import decode_state, encode_state
from .load_target import load_part, target_allocator


def capture_state(parts: Mapping[str, Stateful], rank_parts: Mapping[str, Stateful], world: World) -> dict[str, Any]:
    """Return a copy of the state on this rank, in host memory; of sharded tensors this rank's shards.

    Raises:
        CheckpointError: a state has something other than plain values and tensors.
    """
    of_parts = {part: encode_state(part, owner.state_dict()) for part, owner in parts.items()}
    of_rank = {part: encode_state(part, owner.state_dict()) for part, owner in rank_parts.items()}
    tensors = {name: tensor for _, named in of_parts.values() for name, tensor in named.items()}
    return {
        "world_size": world.size,
        "rank": world.rank,
        "parts": {part: encoded for part, (encoded, _) in of_parts.items()},
        "layouts": {name: (tuple(tensor.shape), _sharding(tensor)) for name, tensor in tensors.items()},
        "tensors": {name: to_local(tensor).detach().to("cpu", copy=True) for name, tensor in tensors.items()},
        "rank_parts": {
            part: (encoded, {name: tensor.detach().to("cpu", copy=True) for name, tensor in named.items()})
            for part, (encoded, named) in of_rank.items()
        },
    }


def check_is_own_state(state: Mapping[str, Any], world: World) -> None:
    """Check that a state was captured on this rank. Every rank must call this.

    Raises:
        ResumeError: on every rank, if it was not on one of them.
    """
    found = [(each.get("world_size"), each.get("rank")) for each in world.all_gather_object(_whose(state))]
    if wrong := [(rank, *of) for rank, of in enumerate(found) if of != (world.size, rank)]:
        rank, size, whose = wrong[0]
        raise ResumeError(
            f"rank {rank} of {world.size} was given a state of rank {whose} of {size}: each rank must load what "
            "state_dict() returned on it; for another number of ranks, use save_checkpoint(path) and fit(resume=path)"
        )


def _whose(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: state.get(key) for key in ("world_size", "rank")}


def restore_state(
    state: Mapping[str, Any], parts: Mapping[str, Stateful], rank_parts: Mapping[str, Stateful], world: World
) -> None:
    """Load the parts in their order, rank parts last. The state can be loaded again. Every rank must call this.

    Raises:
        CheckpointError: on every rank, if a part of one rank cannot load its state.
    """

    def load() -> None:
        if missing := sorted(parts.keys() - state["parts"].keys()):
            raise CheckpointError(f"it has no {', '.join(missing)}")
        for part, owner in parts.items():
            load_part(part, owner.load_state_dict, _decode_captured(state, part, owner))
        for part, owner in rank_parts.items():
            encoded, tensors = state["rank_parts"][part]
            # Copies, because a part may change what it loads.
            copies = {name: tensor.clone() for name, tensor in tensors.items()}
            load_part(part, owner.load_state_dict, decode_state(encoded, copies.__getitem__))

    on_all_ranks(world, "load the state", load)


def _decode_captured(state: Mapping[str, Any], part: str, owner: Stateful) -> Any:
    allocate = target_allocator(part, owner)

    def filled(name: str) -> torch.Tensor:
        saved, (shape, sharding) = state["tensors"][name], state["layouts"][name]
        target = allocate(name, torch.Size(shape), saved.dtype)
        if _sharding(target) != sharding:
            raise ResumeError(
                f"{name} was {sharding or 'not sharded'} and is now {_sharding(target) or 'not sharded'}: load a state "
                "under the strategy and sizes of config.parallel under which it was captured, or use "
                "save_checkpoint(path) and fit(resume=path)"
            )
        with torch.no_grad():
            to_local(target).copy_(saved)
        return target

    return decode_state(state["parts"][part], filled)


def _sharding(tensor: torch.Tensor) -> str:
    """Describe how a tensor is divided among the ranks; empty if it is not."""
    if not isinstance(tensor, DTensor):
        return ""
    return f"sharded as {list(tensor.placements)} over {tuple(tensor.device_mesh.shape)} ranks"
