"""How many trials of a sweep run concurrently on the current nodes, and the wait for the first node."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from headway.trainer.errors import ConfigError

from ..cluster.connect import describe_wait, live_node_resources, placed_groups, wait_timeout_error
from ..config.experiment import Experiment, Scaling
from ..train.elastic import slots
from .schedulers import PBT
from .search import Search

_POLL_EVERY_S = 5.0
# Between two trials, and before the first, processes start that have no place yet.
_STARTING_S = 60.0

Machines = Sequence[Mapping[str, float]]
"""The resources of each machine, by Ray's names."""


class ConcurrencyLimit:
    """How many trials may train at this moment, and since when none does. Looks at the connected cluster.

    Args:
        experiment: with the workers of one trial.
        search: with a limit.
        cpus: of a Ray of our own, that trials may take: others are for something else.
        clock: seconds, from any beginning.

    Attributes:
        at_once: how many may train. Another thread reads it.
        told: the same, for people.

    Raises:
        ConfigError: no trial could ever train.
    """

    def __init__(
        self,
        experiment: Experiment,
        search: Search,
        *,
        cpus: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # To a Ray of our own no machine comes.
        self._scaling = experiment.scaling if cpus is None else replace(experiment.scaling, wait=None)
        self._search, self._cpus, self._clock = search, cpus, clock
        self._taken = placed_groups()
        self._looked_s = self._idle_since_s = clock()
        self._waits_for: str | None = None
        machines = self._machines()
        check_fits(self._scaling, search, machines)
        self.max_concurrent, self.summary = concurrency_for(self._scaling, search, machines)

    def poll(self) -> str | None:
        """Looks again, if it has been some seconds; returns a line for people if there is something new.

        Raises:
            ConfigError: no trial has trained for as long as `Scaling.wait_timeout_s`.
        """
        now_s = self._clock()
        if now_s - self._looked_s < _POLL_EVERY_S:
            return None
        self._looked_s = now_s
        if placed_groups() - self._taken:
            self._idle_since_s, self._waits_for = now_s, None
        else:
            text = describe_wait(self._scaling, self._taken)
            if now_s - self._idle_since_s >= self._scaling.wait_timeout_s + (0.0 if text else _STARTING_S):
                raise wait_timeout_error("a trial", self._scaling)
            if text not in (None, self._waits_for):
                self._waits_for = text
                return text
        before = self.max_concurrent
        self.max_concurrent, self.summary = concurrency_for(self._scaling, self._search, self._machines())
        return self.summary if self.max_concurrent != before else None

    def _machines(self) -> Machines:
        if self._cpus is None:
            return live_node_resources()
        cpus = max(self._cpus, self._scaling.reserved_by(self._scaling.min_workers)["CPU"])
        return [{**machine, "CPU": cpus} for machine in live_node_resources()]


def check_fits(scaling: Scaling, search: Search, machines: Machines) -> None:
    """Refuse a sweep for which there are not the machines, and whose trials wait for none.

    Raises:
        ConfigError: not even one trial fits, or PBT has a single one at a time.
    """
    if trials_that_fit(scaling, machines) < 1 and scaling.wait is None:
        each = ", ".join(f"{amount:g} {name}" for name, amount in scaling.worker_resources.items())
        sizes = Counter(
            ", ".join(f"{one.get(name, 0):g} {name}" for name in scaling.worker_resources) for one in machines
        )
        there = " and ".join(f"{count} with {size}" for size, count in sizes.items()) or "none"
        raise ConfigError(
            f"a trial wants {scaling.min_workers} worker{'s'[: scaling.min_workers > 1]} with {each} on one machine "
            f"each, and the machines are {there}: no trial can ever train; ask for less, or say how long to wait for "
            "machines, as in scaling.wait=10m"
        )
    at_once, told = concurrency_for(scaling, search, machines)
    if isinstance(search.scheduler, PBT) and at_once == 1 < search.num_trials:
        raise ConfigError(
            f"PBT passes on weights between trials that train at the same time, and there would be one at a time "
            f"({told}): let workers share (scaling.cpus_per_worker=0.5), or take another scheduler"
        )


def concurrency_for(scaling: Scaling, search: Search, machines: Machines) -> tuple[int, str]:
    """Return how many trials may train at once, and the same in words.

    Where machines are waited for, as many as the search says: those that have no room yet make machines come.

    Args:
        scaling: the workers of one trial.
        search: with a limit.
        machines: that there are.
    """
    fits = trials_that_fit(scaling, machines)
    room = max(fits, 1)
    is_pbt = isinstance(search.scheduler, PBT)
    wanted = search.concurrent or (search.num_trials if is_pbt else room)
    at_once = min(wanted if scaling.wait else min(wanted, room), search.num_trials)
    total = {name: sum(machine.get(name, 0) for machine in machines) for name in scaling.worker_resources}
    has = ", ".join(f"{amount:g} {name}{'s'[: amount != 1]}" for name, amount in total.items())
    told = f"{has}: {at_once} trial{'s'[: at_once > 1]} of {scaling} at once"
    if at_once > fits:
        told += f", with room for {fits or 'none'} now"
    if is_pbt and at_once < search.num_trials:
        told += f"; PBT wants all {search.num_trials} to train at once"
    return at_once, told


def trials_that_fit(scaling: Scaling, machines: Machines) -> int:
    """Return how many trials there is room for: each worker on one machine, those of a trial on one or several.

    A trial whose number of workers may vary has as many as there is room for, so that others wait for its end.
    """
    there = slots(machines, scaling)
    return there // scaling.max_workers or int(there >= scaling.min_workers)
