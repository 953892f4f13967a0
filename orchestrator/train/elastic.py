"""When a run whose number of workers may vary takes more of them. Decides; the driver looks, the workers act.

Ray Train starts a group that has failed again with as many workers as there is room for: so a run shrinks. It would let
it grow by ending the group in the midst of an update, and would make updates twice. So the growing is ours: the workers
are asked to save and to leave.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..config.experiment import Scaling

RAY_LEARNS_S = 22.0
"""Ray Train looks at the machines of a cluster every 20 s. What it sizes a group by may be so old."""

RESIZING = "resizing"
"""The status of an attempt that has ended so that another one of more workers can go on."""

_LOOK_EVERY_S = 5.0


class RestartToResize(Exception):
    """Ends the workers of a group, which have saved, so that Ray Train starts others, as many as there is room for."""


class ScaleUpPolicy:
    """Decides when the workers are to save and leave, to come back as more.

    Args:
        scaling: how many there may be, and for how long there must have been room for more.
        clock: seconds, from any beginning.
    """

    def __init__(self, scaling: Scaling, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._scaling, self._clock = scaling, clock
        self._patience_s = max(scaling.grow_after.amount, RAY_LEARNS_S)
        self._looked_s = clock()
        # Since when there has been room for more.
        self._since_s: float | None = None
        self._workers = self._asked_of = 0

    def begin(self, workers: int) -> None:
        """Takes note that a group of so many workers trains. One that has not grown is left alone for twice as long."""
        if self._asked_of:
            has_grown = workers > self._asked_of
            self._patience_s = max(self._scaling.grow_after.amount, RAY_LEARNS_S) if has_grown else 2 * self._patience_s
        self._workers, self._asked_of = workers, 0
        self._looked_s, self._since_s = self._clock(), None

    def end(self) -> None:
        """Takes note that the group trains no more."""
        self._workers = 0

    def is_time_to_look(self) -> bool:
        """Whether the number of workers may grow, and some seconds have passed since the last look."""
        is_due = self._clock() - self._looked_s >= _LOOK_EVERY_S
        return is_due and 0 < self._workers < self._scaling.max_workers and not self._asked_of

    def decide(self, room: int) -> bool:
        """Whether to ask the workers now, after a look.

        Args:
            room: for how many workers there is room, those that train included.
        """
        self._looked_s = self._clock()
        if room <= self._workers:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = self._looked_s
        elif self._looked_s - self._since_s >= self._patience_s:
            self._asked_of = self._workers
            return True
        return False


def slots(nodes: Iterable[Mapping[str, float]], scaling: Scaling) -> int:
    """Returns how many workers fit on machines with these resources, whatever else runs there: each on one of them."""
    # First the least of a machine: what nobody counts may be infinite.
    return sum(
        int(min(node.get(name, 0) / amount for name, amount in scaling.worker_resources.items() if amount) + 1e-9)
        for node in nodes
    )


def slots_capped(nodes: Iterable[Mapping[str, float]], scaling: Scaling) -> int:
    """Returns the same, but at most the workers that are wanted."""
    return min(slots(nodes, scaling), scaling.max_workers)


def target_workers(
    nodes: Iterable[Mapping[str, float]], free: Mapping[str, float], scaling: Scaling, *, workers: int
) -> int:
    """Returns how many workers a group may have that has so many now.

    More than now only if all that Ray Train would take is free: it counts whole machines, and would wait in vain for
    what others use of them.

    Args:
        nodes: resources of each machine.
        free: those that nobody uses, over all machines.
        scaling: what is wanted.
        workers: those that there are.
    """
    held = slots_capped(nodes, scaling)
    return held if slots_capped([free], scaling) >= held - workers else workers
