"""When an elastic run scales up: the policy, and the arithmetic of how many workers fit.

Ray Train restarts a failed group with as many workers as fit, which is how a run shrinks. Its own way to grow ends the
group in the middle of an update and repeats updates, so Headway asks the workers to save and exit instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..config.scaling import Scaling

RAY_LEARNS_S = 22.0
"""Ray Train polls the cluster's machines every 20 s, so the view by which it sizes a group may be this old."""

RESIZING = "resizing"
"""The status of an attempt that ended so that the next one can resume with more workers."""

_POLL_EVERY_S = 5.0


class RestartToResize(Exception):
    """Ends a group whose workers have saved, so that Ray Train starts another with as many workers as fit."""


class ScaleUpPolicy:
    """Decides when the workers should save and exit, to restart with more of them.

    Args:
        scaling: gives the most workers, and how long more must fit before scaling up.
        clock: monotonic seconds.
    """

    def __init__(self, scaling: Scaling, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._scaling, self._clock = scaling, clock
        self._delay_s = max(scaling.grow_after.amount, RAY_LEARNS_S)
        self._polled_s = clock()
        # Since when more workers have fit.
        self._since_s: float | None = None
        # Workers of the running group, and of the group that was asked to restart.
        self._workers = self._asked_of = 0

    def begin(self, workers: int) -> None:
        """Start of a group of this many workers. The delay doubles each time that a restart did not bring more."""
        if self._asked_of:
            has_grown = workers > self._asked_of
            self._delay_s = max(self._scaling.grow_after.amount, RAY_LEARNS_S) if has_grown else 2 * self._delay_s
        self._workers, self._asked_of = workers, 0
        self._polled_s, self._since_s = self._clock(), None

    def end(self) -> None:
        """End of the group."""
        self._workers = 0

    def is_due(self) -> bool:
        """Return whether the group may grow and some seconds have passed since the last decision."""
        is_due = self._clock() - self._polled_s >= _POLL_EVERY_S
        return is_due and 0 < self._workers < self._scaling.max_workers and not self._asked_of

    def decide(self, target: int) -> bool:
        """Return whether to ask the workers to restart now.

        Args:
            target: how many workers fit, including the running ones; see `target_workers`.
        """
        self._polled_s = self._clock()
        if target <= self._workers:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = self._polled_s
        elif self._polled_s - self._since_s >= self._delay_s:
            self._asked_of = self._workers
            return True
        return False


def is_sized_by_driver(scaling: Scaling, avoided: Collection[str]) -> bool:
    """Return whether the driver sizes each group of an elastic run, because its workers may not use every node.

    Ray Train counts all nodes, whatever their labels: its group would wait for workers that fit on no usable node.

    Args:
        scaling: the wanted workers.
        avoided: ids of the nodes to keep the workers off.
    """
    return scaling.is_elastic and bool(avoided or scaling.label_selector)


def slots(nodes: Iterable[Mapping[str, float]], scaling: Scaling) -> int:
    """Return how many workers fit on machines with these resources, each worker on one machine."""
    # The minimum first, then int(): uncounted resources may be infinite.
    return sum(
        int(min(node.get(name, 0) / amount for name, amount in scaling.worker_resources.items() if amount) + 1e-9)
        for node in nodes
    )


def slots_capped(nodes: Iterable[Mapping[str, float]], scaling: Scaling) -> int:
    """Return `slots`, capped at the most workers of the run."""
    return min(slots(nodes, scaling), scaling.max_workers)


def target_workers(
    nodes: Iterable[Mapping[str, float]], free: Iterable[Mapping[str, float]], scaling: Scaling, *, workers: int
) -> int:
    """Return how many workers a group of `workers` could restart with.

    More than now only if everything that Ray Train would take is free: it sizes a group by whole machines, and would
    wait in vain for resources that other applications hold.

    Args:
        nodes: resources of each machine.
        free: unused resources of each machine.
        scaling: the wanted workers.
        workers: the running workers.
    """
    held = slots_capped(nodes, scaling)
    return held if slots_capped(free, scaling) >= held - workers else workers
