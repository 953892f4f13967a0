"""How many trials train concurrently, and when the wait for machines times out. Without a running Ray."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from headway.orchestrator import PBT, LogUniform, Scaling, Search
from headway.orchestrator.cluster import connect
from headway.orchestrator.sweeps import concurrency as orchestrator_capacity
from headway.orchestrator.sweeps.concurrency import ConcurrencyLimit
from headway.orchestrator.train.elastic import slots
from headway.trainer.errors import ConfigError
from tests.orchestrator.sweeps.test_search import search

FOURS = [{"CPU": 4.0, "GPU": 1.0}, {"CPU": 4.0}]


@pytest.mark.parametrize(
    ("scaling", "machines", "asked", "at_once", "told"),
    [
        (Scaling(), FOURS, {"concurrent": 3}, 3, "8 CPUs: 3 concurrent trials of 1 worker"),
        (Scaling(), FOURS, {"trials": 5}, 5, "8 CPUs: 5 concurrent trials of 1 worker"),
        # One worker cannot use the CPUs of two machines.
        (Scaling(cpus_per_worker=3), FOURS, {}, 2, "8 CPUs: 2 concurrent trials of 1 worker"),
        (Scaling(cpus_per_worker=3, workers=2), FOURS, {}, 1, "8 CPUs: 1 concurrent trial of 2 workers"),
        (Scaling(workers=3), FOURS, {}, 2, "8 CPUs: 2 concurrent trials of 3 workers"),
        (
            Scaling(cpus_per_worker=0.5, gpus_per_worker=0.5),
            FOURS,
            {},
            2,
            "8 CPUs, 1 GPU: 2 concurrent trials of 1 worker",
        ),
        # Elastic trials take all that fits, so others would wait for their end.
        (Scaling(workers=(1, 4)), FOURS, {}, 2, "8 CPUs: 2 concurrent trials of 1 to 4 workers"),
        (Scaling(workers=(1, 9)), FOURS, {}, 1, "8 CPUs: 1 concurrent trial of 1 to 9 workers"),
        # Waiting trials make machines start.
        (
            Scaling(wait="9m"),
            [],
            {"concurrent": 8},
            8,
            "0 CPUs: 8 concurrent trials of 1 worker, of which none fit now",
        ),
        (
            Scaling(wait="9m"),
            FOURS,
            {"concurrent": 9},
            9,
            "8 CPUs: 9 concurrent trials of 1 worker, of which 8 fit now",
        ),
        (Scaling(wait="9m"), FOURS, {"trials": 20}, 8, "8 CPUs: 8 concurrent trials of 1 worker"),
        (Scaling(wait="9m"), [], {}, 1, "0 CPUs: 1 concurrent trial of 1 worker, of which none fit now"),
        (Scaling(wait="9m"), FOURS, {"scheduler": PBT()}, 10, "10 concurrent trials of 1 worker, of which 8 fit now"),
        (
            Scaling(cpus_per_worker=2),
            FOURS,
            {"scheduler": PBT()},
            4,
            "4 concurrent trials of 1 worker; PBT works best with all 10",
        ),
    ],
)
def test_as_many_trials_train_at_once_as_machines_hold_or_are_to_come(
    scaling: Scaling,
    machines: Any,
    asked: dict[str, Any],
    at_once: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Cluster(monkeypatch, machines)
    capacity = ConcurrencyLimit(scaling, search(**asked))
    assert capacity.max_concurrent == at_once
    assert told in capacity.summary


@pytest.mark.parametrize(
    ("scaling", "asked", "message"),
    [
        (
            Scaling(cpus_per_worker=6),
            {},
            "the cluster has 0 of 1 places of 6 CPU on one machine that 1 worker needs: lower scaling.workers or their",
        ),
        (Scaling(workers=9), {}, "the cluster has 8 of 9 CPU that 9 workers need: lower"),
        (Scaling(gpus_per_worker=2), {}, "the cluster has 1 of 2 GPU that 1 worker needs: lower"),
        (Scaling(), {"scheduler": PBT(), "concurrent": 1}, "PBT needs several concurrent trials, between which it"),
    ],
)
def test_what_no_machine_holds_is_refused(
    scaling: Scaling, asked: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Cluster(monkeypatch, FOURS)
    with pytest.raises(ConfigError, match=message):
        ConcurrencyLimit(scaling, search(**asked))


def test_a_ray_that_was_started_here_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    Cluster(monkeypatch, [{"CPU": 4.0}])
    asked = Scaling(resources_per_worker={"bigmem": 1}, wait="9m")
    with pytest.raises(ConfigError, match="the cluster has 0 of 1 bigmem that 1 worker needs: lower"):
        ConcurrencyLimit(asked, search(), cpus=2)
    assert ConcurrencyLimit(asked, search(concurrent=2)).max_concurrent == 2


def test_what_nobody_counts_is_no_limit() -> None:
    assert slots([{"CPU": 4.0, "memory": float("inf")}], Scaling(resources_per_worker={"memory": 5})) == 4


class Cluster:
    """The queries of a sweep to Ray, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, machines: list[dict[str, float]]) -> None:
        self.machines, self.taken, self.now_s = machines, {"of somebody else"}, 0.0
        for name in ("live_node_resources", "placed_groups"):
            monkeypatch.setattr(orchestrator_capacity, name, getattr(self, name))
            monkeypatch.setattr(connect, name, getattr(self, name))
        total = lambda: dict(sum(map(Counter, self.machines), Counter()))  # noqa: E731
        monkeypatch.setattr(connect.ray, "is_initialized", lambda: True)
        monkeypatch.setattr(connect.ray, "cluster_resources", total)
        monkeypatch.setattr(connect.ray, "available_resources", total)
        monkeypatch.setattr(connect, "free_node_resources", self.live_node_resources)

    def live_node_resources(self, _: Scaling) -> list[dict[str, float]]:
        return self.machines

    def placed_groups(self) -> set[str]:
        return set(self.taken)

    def poll(self, capacity: ConcurrencyLimit, *, after_s: float) -> str | None:
        self.now_s += after_s
        return capacity.poll()


def test_a_sweep_uses_machines_that_come_later_and_says_what_it_waits_for_until_it_gives_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch, [])
    asked = Scaling(cpus_per_worker=2, wait="1m")
    capacity = ConcurrencyLimit(
        asked, Search(space={"config.dropout": LogUniform(0.1, 0.2)}), clock=lambda: cluster.now_s
    )
    assert capacity.max_concurrent == 1

    # Each line is printed once; a worker cannot use the CPUs of two machines.
    assert cluster.poll(capacity, after_s=1) is None
    assert cluster.poll(capacity, after_s=5) == "waiting for 1 worker: none fits (0 CPU free of 0)"
    assert cluster.poll(capacity, after_s=5) is None
    cluster.machines = [{"CPU": 1.0}, {"CPU": 1.0}]
    assert cluster.poll(capacity, after_s=5) == "waiting for 1 worker: none fits (2 CPU free of 2)"

    # No timeout while a trial trains; when it loses its machine, the wait restarts.
    cluster.machines, cluster.taken = [{"CPU": 4.0}, {"CPU": 5.0}], {"of somebody else", "of a trial"}
    assert cluster.poll(capacity, after_s=40) == "9 CPUs: 4 concurrent trials of 1 worker"
    assert capacity.max_concurrent == 4
    assert cluster.poll(capacity, after_s=1000) is None
    cluster.machines, cluster.taken = [{"CPU": 1.0}], set()
    assert cluster.poll(capacity, after_s=50) == "waiting for 1 worker: none fits (1 CPU free of 1)"
    with pytest.raises(
        ConfigError, match="timed out after 1m00s waiting for a trial: the cluster has 1 of 2 CPU; to wait longer"
    ):
        cluster.poll(capacity, after_s=10)
    cluster.machines = [{"CPU": 1.0}, {"CPU": 1.0}]
    with pytest.raises(ConfigError, match="the cluster has 0 of 1 places of 2 CPU on one machine; to wait longer"):
        cluster.poll(capacity, after_s=10)


def test_processes_have_time_to_start_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, [{"CPU": 4.0}])
    asked = Scaling(workers=2, wait="8s")
    capacity = ConcurrencyLimit(asked, search(), clock=lambda: cluster.now_s)
    assert cluster.poll(capacity, after_s=60) is None
    with pytest.raises(ConfigError, match="timed out after 8s waiting for a trial: the cluster is large enough, but"):
        cluster.poll(capacity, after_s=10)


def test_no_machine_is_waited_for_where_none_can_come(monkeypatch: pytest.MonkeyPatch) -> None:
    Cluster(monkeypatch, [{"CPU": 4.0}])
    asked = Scaling(wait="9m")
    assert ConcurrencyLimit(asked, search(concurrent=8), cpus=2).max_concurrent == 2
    assert ConcurrencyLimit(asked, search(concurrent=8)).max_concurrent == 8
