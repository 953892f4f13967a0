"""In a step that calls `backward` and `step` itself: which gradients are for which optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.optim import Optimizer


class GradientIsolation:
    """Keeps what the loss of one optimizer leaves in the parameters of another from becoming part of their gradient.

    A turn is one call of `backward` or several, and the calls of `step` that follow: the gradients are for the
    optimizers that step. A generator's loss goes through its critic, too. When the next turn begins, or the micro-batch
    ends, the critic's gradients are again what they were before, with all that earlier micro-batches have added up.

    Args:
        optimizers: all of the trainer.

    Attributes:
        may_step_manually: whether `training_step` calls `step` itself, as far as is known: not if the first did not.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._owners: set[Optimizer] = set()
        self._before: dict[torch.Tensor, torch.Tensor] | None = None
        self._steps_manually = False
        self.may_step_manually = True

    def begin_update(self) -> None:
        """Takes note that there are no gradients yet."""
        self._before = {}

    def before_backward(self) -> None:
        """Ends the last turn if an optimizer has stepped since, and begins one if none is going on."""
        if self._owners:
            self._restore_gradients()
        if self._before is None and self._steps_manually:
            # Copies: backward adds to the gradients in place.
            self._before = {p: p.grad.clone() for o in self._optimizers for p in _parameters(o) if p.grad is not None}

    def step(self, optimizer: Optimizer) -> None:
        """Takes note of whose turn it is."""
        self._steps_manually = self.may_step_manually = True
        self._owners.add(optimizer)

    def end_micro_batch(self) -> None:
        """Ends the last turn."""
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


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
