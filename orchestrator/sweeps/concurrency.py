"""How many trials of a sweep run concurrently on the current nodes, and the wait for the first node."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from headway.trainer.errors import ConfigError

from ..cluster.connect import check_resources, describe_wait, live_node_resources, placed_groups, wait_timeout_error
from ..config.scaling import Scaling
from ..train.elastic import slots
from .search import Search

_POLL_EVERY_S = 5.0
# The processes of a trial take time to start before they have a placement group.
_STARTING_S = 60.0

Machines = Sequence[Mapping[str, float]]
"""Resources of each machine, by Ray's names."""


class ConcurrencyLimit:
    """How many trials may train at the moment, and for how long none has. Polls the connected cluster.

    Args:
        scaling: the workers of one trial.
        search: gives the user's limit.
        cpus: CPUs that trials may use if Ray was started here; the others are reserved for reading data.
        clock: monotonic seconds.

    Attributes:
        max_concurrent: how many trials may train. Another thread reads it.
        summary: the same as text.

    Raises:
        ConfigError: no trial could ever train, or PBT would train one trial at a time.
    """

    def __init__(
        self,
        scaling: Scaling,
        search: Search,
        *,
        cpus: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # No machine can join a Ray that was started here.
        self._scaling = scaling if cpus is None else replace(scaling, wait=None)
        self._search, self._cpus, self._clock = search, cpus, clock
        self._taken = placed_groups()
        self._looked_s = self._idle_since_s = clock()
        self._waits_for: str | None = None
        check_resources(self._scaling)
        self.max_concurrent, self.summary = concurrency_for(self._scaling, search, self._machines())
        if search.is_population_based and self.max_concurrent == 1 < search.num_trials:
            raise ConfigError(
                "PBT needs several concurrent trials, between which it copies weights, but only one fits "
                f"({self.summary}): let workers share a CPU (scaling.cpus_per_worker=0.5), or use another scheduler"
            )

    def poll(self) -> str | None:
        """Update the limit if some seconds have passed, and return a line to print if something changed.

        Raises:
            ConfigError: no trial has trained for `Scaling.wait_timeout_s`.
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
        there = live_node_resources(self._scaling)
        if self._cpus is None:
            return there
        cpus = max(self._cpus, self._scaling.reserved_by(self._scaling.min_workers)["CPU"])
        return [{**machine, "CPU": cpus} for machine in there]


def concurrency_for(scaling: Scaling, search: Search, machines: Machines) -> tuple[int, str]:
    """Return how many trials may train concurrently, and the same as text.

    If trials wait for machines, the user's limit applies alone: waiting trials make the cluster scale up.

    Args:
        scaling: the workers of one trial.
        search: gives the user's limit.
        machines: resources of the current machines.
    """
    fits = trials_that_fit(scaling, machines)
    room = max(fits, 1)
    is_pbt = search.is_population_based
    wanted = search.concurrent or (search.num_trials if is_pbt else room)
    max_concurrent = min(wanted if scaling.wait else min(wanted, room), search.num_trials)
    total = {name: sum(machine.get(name, 0) for machine in machines) for name in scaling.worker_resources}
    has = ", ".join(f"{amount:g} {name}{'s'[: amount != 1]}" for name, amount in total.items())
    summary = f"{has}: {max_concurrent} concurrent trial{'s'[: max_concurrent > 1]} of {scaling}"
    if max_concurrent > fits:
        summary += f", of which {fits or 'none'} fit{'s'[: fits == 1]} now"
    if is_pbt and max_concurrent < search.num_trials:
        summary += f"; PBT works best with all {search.num_trials} concurrent"
    return max_concurrent, summary


def trials_that_fit(scaling: Scaling, machines: Machines) -> int:
    """Return how many trials fit; the workers of one trial may be on several machines.

    An elastic trial takes all the workers that fit, up to its maximum, so others wait for its end.
    """
    there = slots(machines, scaling)
    return there // scaling.max_workers or int(there >= scaling.min_workers)
