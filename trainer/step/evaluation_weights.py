"""Optimizers that train other weights than those to evaluate, as the schedule-free ones do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer


def set_training_mode(optimizers: Iterable[Optimizer]) -> None:
    """Call `train()` of the optimizers that have modes; without it their `step()` raises."""
    for optimizer in _with_modes(optimizers):
        optimizer.train()


@contextmanager
def evaluation_weights(optimizers: Iterable[Optimizer], reshard: Callable[[], None]) -> Iterator[None]:
    """Put optimizers that have modes in evaluation mode inside this context; enter it under `no_grad`.

    Afterwards the weights are restored, bit for bit: `train()` alone would compute them again, with other
    rounding, so that an evaluation would change the training.

    Args:
        optimizers: those without `train()` and `eval()` are left as they are.
        reshard: frees gathered weights, which would be outdated.
    """
    having = _with_modes(optimizers)
    weights = [
        (parameter, parameter.clone())
        for optimizer in having
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    if having:
        reshard()
    for optimizer in having:
        optimizer.eval()
    try:
        yield
    finally:
        if having:
            reshard()
        for optimizer in having:
            optimizer.train()
        for parameter, weight in weights:
            parameter.copy_(weight)


def _with_modes(optimizers: Iterable[Optimizer]) -> list[Any]:
    return [
        optimizer
        for optimizer in optimizers
        if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))
    ]
