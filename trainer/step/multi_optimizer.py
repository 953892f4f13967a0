"""Several optimizers, for steps that call `backward` and `step` themselves: whose gradients are whose."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..distributed.ddp import ReplicatedModule


class GradientIsolation:
    """Keeps the loss of one optimizer from adding to the gradients of another's parameters.

    A turn is one or several calls of `backward` and the calls of `step` that follow; its gradients are for the
    optimizers that step. For example, a generator's loss goes through its critic: when the next turn begins, or the
    micro-batch ends, the critic's gradients are restored to those that its own losses have accumulated.

    Args:
        optimizers: all optimizers of the trainer.

    Attributes:
        may_step_manually: whether `training_step` may call `step`; False once a micro-batch did not.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._owners: set[Optimizer] = set()
        self._before: dict[torch.Tensor, torch.Tensor] | None = None
        self._steps_manually = False
        self.may_step_manually = True

    def begin_update(self) -> None:
        """Start an update, without gradients."""
        self._before = {}

    def before_backward(self) -> None:
        """End the turn if an optimizer has stepped since, and start one if there is none."""
        if self._owners:
            self._restore_gradients()
        if self._before is None and self._steps_manually:
            # Copies: backward adds to the gradients in place.
            self._before = {p: p.grad.clone() for o in self._optimizers for p in _parameters(o) if p.grad is not None}

    def step(self, optimizer: Optimizer) -> None:
        """Record that the current turn is this optimizer's."""
        self._steps_manually = self.may_step_manually = True
        self._owners.add(optimizer)

    def end_micro_batch(self) -> None:
        """End the turn."""
        self.may_step_manually = self._steps_manually
        self._restore_gradients()

    def _restore_gradients(self) -> None:
        if self._owners and self._before is not None:
            for optimizer in self._optimizers:
                if optimizer not in self._owners:
                    for parameter in _parameters(optimizer):
                        parameter.grad = self._before.get(parameter)
        self._owners.clear()
        self._before = None


def trained_in_parts(models: Iterable[ReplicatedModule], optimizers: Sequence[Optimizer]) -> list[ReplicatedModule]:
    """Return the models whose parameters are divided among several optimizers, as in an actor and its critic."""
    held = [set(_parameters(optimizer)) for optimizer in optimizers]
    return [model for model in models if sum(not own.isdisjoint(model.parameters()) for own in held) > 1]


def calls_backward_repeatedly(cls: type) -> bool:
    """Whether `training_step` of a class, with the methods that it names, calls `backward` in more than one place."""
    seen, names, calls = {"backward", "step"}, ["training_step"], 0
    while names:
        name = names.pop()
        method: Any = getattr(cls, name, None)
        code = getattr(inspect.unwrap(method), "__code__", None)
        if code is None or name in seen:
            continue
        seen.add(name)
        calls += sum(each.argval == "backward" for each in dis.get_instructions(code))
        names.extend(code.co_names)
    return calls > 1


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
