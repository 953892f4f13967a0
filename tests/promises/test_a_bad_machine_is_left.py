"""A run leaves a machine on which its workers die, and one that is gone; on a real Ray of several nodes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from headway.orchestrator import Retries, fit
from headway.trainer import CheckpointConfig
from headway.trainer.trackers.jsonl import read_records
from tests.machines import machines
from tests.promises.test_a_failure_is_explained import experiment, of_kind, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def several_machines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    assert not ray.is_initialized(), "needs its own Ray"
    with machines(monkeypatch, 2) as cluster:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        try:
            yield cluster
        finally:
            ray.shutdown()


@pytest.mark.extended
def test_a_node_on_which_ranks_die_is_avoided(several_machines: Any, tmp_path: Path) -> None:
    # The node that Ray chose before, which it chooses again.
    probe = experiment(tmp_path / "probe", "")
    fit(probe)
    bad = of_kind(probe, "attempt_started")[0]["workers"][0]["node"]
    faulty = experiment(tmp_path, bad)
    assert fit(faulty).status == "completed"
    nodes = [event["workers"][0]["node"] for event in of_kind(faulty, "attempt_started")]
    failures = of_kind(faulty, "group_failed")
    if nodes[0] == bad:
        assert nodes[-1] != bad
        assert len(nodes) == len(failures) + 1 <= 3
        if len(failures) == 2:
            assert "where workers died twice without progress" in failures[-1]["next"]


@pytest.mark.extended
def test_a_lost_machine_is_called_that_and_the_run_resumes(several_machines: Any, tmp_path: Path) -> None:
    faulty = experiment(
        tmp_path, "", workers=2, pause_s=0.1, retries=Retries(max_failures=0),
        checkpoint=CheckpointConfig(every="5 steps"),
    )  # fmt: skip
    several_machines.add_node(num_cpus=1)
    nodes = several_machines.list_all_nodes()

    def remove() -> None:
        wait_for(lambda: any(each["step"] >= 8 for each in read_records(f"{faulty.run_dir}/metrics.jsonl")))
        used = of_kind(faulty, "attempt_started")[0]["workers"][-1]["node"]
        lost = next(node for node in nodes if node.node_id == used)
        several_machines.remove_node(lost, allow_graceful=False)

    remover = threading.Thread(target=remove)
    remover.start()
    result = fit(faulty)
    remover.join()
    assert (result.status, result.steps, result.attempts) == ("completed", 40, 2)
    failure = of_kind(faulty, "group_failed")[0]
    assert failure["text"].startswith("lost node ")
    assert failure["failure"]["lost_node"]
