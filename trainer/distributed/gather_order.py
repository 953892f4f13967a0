"""Finds ranks that gather different parts of a sharded model at a time, as where the data chooses experts of a layer.

All ranks gather a unit of FSDP2 together. Ranks that gather different ones mix up their weights without an error if
these have equal sizes, or wait for each other until the timeout if one gathers more than another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..errors import StepError
from .fsdp import callable_roots, units_of
from .world import World

_UPDATES_TO_COMPARE = 2
_TIMEOUTS = ("Timed out waiting", "Application timeout caused pair closure", "operation timeout")
"""In messages of gloo and NCCL."""


class GatherOrder:
    """Compares the order in which the training steps of all ranks gather units.

    In the first updates before each gather, so that no rank waits in vain. Later it only computes `fingerprint`, which
    the loop compares now and then.

    Args:
        models: sharded, by name.
        world: all ranks.
        is_outside: whether a call of a model that is not recorded is one outside of updates and evaluations.

    Attributes:
        calls_outside: how often this rank has called models outside of updates and evaluations.
        fingerprint: of all gathers so far, below 2**30; equal on all ranks after the same update.
    """

    def __init__(self, models: Mapping[str, nn.Module], world: World, *, is_outside: Callable[[], bool]) -> None:
        self._world, self._is_outside = world, is_outside
        self._names: list[str] = []
        self._around: list[str] = []
        self._updates_left = _UPDATES_TO_COMPARE
        self._is_recording = False
        self.fingerprint = self.calls_outside = 0
        for name, model in models.items():
            for root in callable_roots(model):
                root.register_forward_pre_hook(self._count_call, prepend=True)
            modules = dict(model.named_modules())
            units = {id(each) for each in units_of([model])}
            for path, unit in modules.items():
                if id(unit) in units and (own := _first_parameter(unit)) is not None:
                    hook = partial(self._before_forward, len(self._names), *own)
                    unit.register_forward_pre_hook(hook, prepend=True)
                    self._names.append(f"{name}.{path}".rstrip("."))
                    self._around.append(_class_around(modules, path))

    def start(self) -> None:
        """Begin to record, at the beginning of a step."""
        self._is_recording = True

    def stop(self) -> None:
        """End to record, for the backward pass, whose order follows. Every rank must call this equally often."""
        if self._is_recording and self._updates_left:
            self._compare(0)
        self._is_recording = False

    def end_update(self) -> None:
        """Count an update."""
        self._updates_left = max(0, self._updates_left - 1)

    def _count_call(self, *_: Any) -> None:
        if not self._is_recording and self._is_outside():
            self.calls_outside += 1

    def _before_forward(self, number: int, owner: nn.Module, key: str, shard: torch.Tensor | None, *_: Any) -> None:
        # Otherwise it is gathered already.
        if self._is_recording and owner._parameters[key] is shard:
            self.fingerprint = (self.fingerprint * 1_000_003 + number + 1) & 0x3FFFFFFF
            if self._updates_left:
                self._compare(number + 1)

    def _compare(self, event: int) -> None:
        total, squares = self._world.sum_ints(event, event * event)
        if self._world.size * squares == total * total:
            return
        events = self._world.all_gather_object(event)
        parts = [self._names[each - 1] if each else "none" for each in events]
        listed = ", ".join(f"rank {rank}: {part}" for rank, part in enumerate(parts[:4]))
        around = tuple(dict.fromkeys(self._around[each - 1] for each in events if each))
        if all(around):
            advice = f"shard the layers around them instead, by parallel.shard_modules={around!r}"
        else:
            advice = "put them into a module with forward() and name its class in parallel.shard_modules"
        raise StepError(
            f"the ranks gather different parts of the model at the same time ({listed}), and FSDP2 would mix up their "
            f"weights, or wait for ever: if the data chooses which of them run, {advice}, and set "
            "parallel.find_unused_parameters=True"
        )


def differing_gathers() -> StepError:
    """Return the error for fingerprints that differ between ranks."""
    return StepError(
        "the ranks have gathered different parts of the model at the same time since their last agreement, and FSDP2 "
        "has mixed up their weights. If a rank calls the model outside of updates, such as to choose an action, call "
        "it equally often on all ranks; if the data chooses which parts run, such as the experts of a layer, name the "
        "class of the layer in parallel.shard_modules and set parallel.find_unused_parameters=True. Then begin from a "
        "checkpoint before that"
    )


def add_timeout_advice(error: BaseException, calls_outside: int | None) -> None:
    """Add a note to a timeout of a collective, which ranks that call a sharded model unequally often run into.

    Args:
        error: of any kind; only timeouts get the note.
        calls_outside: see `GatherOrder`; None if unknown.
    """
    if not isinstance(error, RuntimeError) or not any(words in str(error) for words in _TIMEOUTS):
        return
    here = "" if calls_outside is None else f" (calls of this rank: {calls_outside})"
    error.add_note(
        "under FSDP2 all ranks must call a model equally often: if one calls it outside of updates, such as to choose "
        f"an action{here}, and another does not, they wait for each other until the timeout. Call it on all ranks and "
        "ignore the result where it is not needed, or use parallel.strategy='ddp'"
    )


def _first_parameter(unit: nn.Module) -> tuple[nn.Module, str, torch.Tensor | None] | None:
    """Return a sharded parameter of a unit that is not one of a unit inside it, as its module, its name and itself."""
    own = [(unit, key, each) for key, each in unit._parameters.items() if isinstance(each, DTensor)]
    if own:
        return own[0]
    for child in unit.children():
        if not isinstance(child, FSDPModule) and (found := _first_parameter(child)) is not None:
            return found
    return None


def _class_around(modules: Mapping[str, nn.Module], path: str) -> str:
    """Return the name of the user's class of the module around a unit; "" if that is the whole model."""
    while path := path.rpartition(".")[0]:
        cls = type(modules[path])
        if cls.forward is not nn.Module.forward:
            return next(each.__name__ for each in cls.__mro__ if not issubclass(each, FSDPModule))
    return ""
