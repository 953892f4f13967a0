"""Random numbers of optimizers, equal on all ranks: replicas that are updated by different ones would drift apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch.optim import Optimizer

from ..checkpoints.rng import RngState, equal_states, preserve_rng, seed_for

_UPDATES_TO_WATCH = 2


class OptimizerRng:
    """Seeds the generators alike on all ranks while an optimizer steps that draws random numbers, such as Kron.

    Whether it draws shows in its first steps; one that does not costs nothing later.

    Args:
        optimizers: of the run.
        seed: of the run.
    """

    def __init__(self, optimizers: Iterable[Optimizer], seed: int) -> None:
        self._seed = seed
        self._steps_to_watch = dict.fromkeys(optimizers, _UPDATES_TO_WATCH)
        self._place = (-1, 0)

    @contextmanager
    def alike(self, optimizer: Optimizer, step: int) -> Iterator[None]:
        """Return a context for `optimizer.step()` in the update `step`."""
        if optimizer not in self._steps_to_watch:
            yield
            return
        update, number = self._place
        self._place = (step, number + 1 if step == update else 0)
        with preserve_rng():
            seed_for(self._seed, "optimizer", *self._place)
            before = RngState().state_dict()
            yield
            draws = not equal_states(before, RngState().state_dict())
        if draws:
            self._steps_to_watch[optimizer] = -1
        elif self._steps_to_watch[optimizer] > 0:
            self._steps_to_watch[optimizer] -= 1
            if not self._steps_to_watch[optimizer]:
                del self._steps_to_watch[optimizer]
