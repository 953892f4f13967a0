"""On a real cluster of several nodes, a run scales up when a node joins, and continues without one that dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from headway.orchestrator import Run
from headway.orchestrator.storage.events import Event, read_events
from headway.orchestrator.storage.folder import Folder
from headway.trainer import Duration
from headway.trainer.trackers.jsonl import read_records
from tests.machines import machines
from tests.on_ray import OnRay, OnRayConfig, write_rows

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.extended]

ROWS, BATCH = 96, 16
IN_EPOCH = ROWS // BATCH


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Start a head without room for workers, and one node with room for one."""
    with machines(monkeypatch, 1) as cluster:
        yield cluster


def _wait(until: Callable[[], Any], driver: subprocess.Popen[str], *, timeout_s: float = 240) -> None:
    deadline = time.monotonic() + timeout_s
    while not until():
        if driver.poll() is not None or time.monotonic() > deadline:
            driver.kill()
            raise AssertionError(f"the driver has ended, or is late: {driver.communicate()[0]}")
        time.sleep(0.05)


def _rows(run_dir: Path) -> dict[int, set[int]]:
    """Return the rows of each update over all ranks; repeated updates count as the last attempt made them."""
    seen: dict[int, dict[int, set[int]]] = {}
    for file in run_dir.glob("rows-*.jsonl"):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            seen.setdefault(record["step"], {}).setdefault(record["attempt"], set()).update(record["ids"])
    return {step: attempts[max(attempts)] for step, attempts in sorted(seen.items())}


def _start_driver(cluster: Cluster, tmp_path: Path, *settings: str) -> subprocess.Popen[str]:
    """Start an elastic run of one or two workers."""
    settings = (
        "name=run", f"storage={tmp_path}/runs", f"config.data={tmp_path}/data", "config.engine=threads",
        "config.pause_s=0.2", f"config.global_batch_size={BATCH}", "config.max_epochs=1000",
        "config.evaluate_every=null", "config.log_every=1 steps", "config.checkpoint.every=20 steps",
        "scaling.workers=1..2", "scaling.grow_after=5s", "retries.max_failures=1", "retries.max_errors=0", *settings,
    )  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "headway.orchestrator", "fit", "tests.on_ray:OnRay", *settings],
        env={**os.environ, "RAY_ADDRESS": cluster.address}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def _check_equals_undisturbed_run(run_dir: Path, alone: Path, data: str, *, steps: int) -> None:
    """Rows of each update, learning rates and losses are as in one undisturbed process."""
    config = OnRayConfig(
        data=data, global_batch_size=BATCH, max_steps=steps, evaluate_every=None, log_every=Duration(1, "steps")
    )
    OnRay(config, run_dir=str(alone)).fit()
    rows, records = _rows(run_dir), _records(run_dir)
    assert rows == _rows(alone)
    for first in range(0, steps - IN_EPOCH, IN_EPOCH):
        assert sorted(row for step in range(first, first + IN_EPOCH) for row in rows[step]) == list(range(ROWS))
    assert list(records) == list(range(1, steps + 1))
    for step, numbers in _records(alone).items():
        assert records[step] == pytest.approx(numbers, abs=1e-3)


def _records(run_dir: Path) -> dict[int, tuple[float, float]]:
    records = read_records(str(run_dir / "metrics.jsonl"))
    assert len({record["step"] for record in records}) == len(records)
    return {record["step"]: (record["train/loss"], record["lr"]) for record in records}


def test_a_run_takes_the_node_that_comes_and_goes_on_without_it(cluster: Cluster, tmp_path: Path) -> None:
    run_dir, data = tmp_path / "runs/run", write_rows(tmp_path / "data", ROWS)
    driver = _start_driver(cluster, tmp_path)

    def events(kind: str) -> list[Event]:
        return [each for each in read_events(Folder(str(run_dir))) if each["event"] == kind]

    try:
        _wait(lambda: events("training"), driver)
        node = cluster.add_node(num_cpus=1)
        _wait(lambda: len(events("training")) == 2, driver)
        at = events("training")[1]["step"]
        _wait(lambda: events("checkpoint_saved")[-1]["step"] > at, driver)
        cluster.remove_node(node, allow_graceful=False)
        _wait(lambda: len(events("training")) == 3, driver)
        # The updates lost with the dead group were repeated, and more were made.
        furthest = max(_rows(run_dir)) + IN_EPOCH
        _wait(lambda: max(_records(run_dir)) > furthest, driver)
        driver.terminate()
        shown, _ = driver.communicate(timeout=120)
    finally:
        driver.kill()
    assert driver.returncode == 128 + signal.SIGTERM

    # One more attempt per change; only the death of the node was a failure.
    assert [each["world_size"] for each in events("attempt_started")] == [1, 2, 1]
    assert [each["attempt"] for each in events("group_failed")] == [2]
    left, end = events("attempt_ended")
    assert (left["attempt"], left["status"]) == (1, "resizing")
    grown, shrunk = ({name: each[name] for name in ("from", "to", "step")} for each in events("resized"))
    # Scaling up costs no update: the second group resumes where the first ended.
    assert grown == {"from": 1, "to": 2, "step": left["step"]}
    assert (shrunk["from"], shrunk["to"]) == (2, 1)
    assert shrunk["step"] in [each["step"] for each in events("checkpoint_saved")]
    assert f"2 workers now (1 before), resuming from step {grown['step']}\n" in shown
    assert f"1 worker now (2 before), resuming from step {shrunk['step']}\n" in shown
    record = Run(str(run_dir)).record
    assert (record.status, record.attempts, record.workers, record.steps) == ("interrupted", 3, 1, end["step"])
    assert (record.min_workers, record.max_workers) == (1, 2)

    _check_equals_undisturbed_run(run_dir, tmp_path / "alone", data, steps=end["step"])


@pytest.mark.parametrize(
    "needs", ["scaling.label_selector={zone: a}", "scaling.accelerator_type=HW-A"], ids=["label", "accelerator"]
)
def test_a_run_of_one_kind_of_node_shrinks_and_grows_on_that_kind_alone(
    needs: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nodes of another kind are idle all the time, and the run does not use them when one of its kind dies."""
    run_dir, data = tmp_path / "runs/run", write_rows(tmp_path / "data", ROWS)
    ours: dict[str, Any] = {"labels": {"zone": "a"}, "resources": {"accelerator_type:HW-A": 1}}

    def events(kind: str) -> list[Event]:
        return [each for each in read_events(Folder(str(run_dir))) if each["event"] == kind]

    with machines(monkeypatch, 0) as cluster:
        nodes = [cluster.add_node(num_cpus=1, **ours) for _ in range(2)]
        cluster.add_node(num_cpus=2, labels={"zone": "b"}, resources={"accelerator_type:HW-B": 2})
        driver = _start_driver(cluster, tmp_path, needs)

        def trains(attempt: int) -> None:
            """Wait until an attempt has saved a checkpoint."""
            _wait(lambda: len(events("training")) == attempt, driver)
            at = events("training")[-1]["step"]
            _wait(lambda: events("checkpoint_saved") and events("checkpoint_saved")[-1]["step"] > at, driver)

        try:
            trains(1)
            cluster.remove_node(nodes[1], allow_graceful=False)
            trains(2)
            nodes.append(cluster.add_node(num_cpus=1, **ours))
            trains(3)
            driver.terminate()
            driver.communicate(timeout=120)
        finally:
            driver.kill()
    assert driver.returncode == 128 + signal.SIGTERM

    first, second, third = (node.node_id for node in nodes)
    used = [{worker["node"] for worker in each["workers"]} for each in events("attempt_started")]
    assert used == [{first, second}, {first}, {first, third}]
    assert [(each["from"], each["to"]) for each in events("resized")] == [(2, 1), (1, 2)]
    assert [each["attempt"] for each in events("group_failed")] == [1]
    assert [(each["attempt"], each["status"]) for each in events("attempt_ended")][0] == (2, "resizing")
    end = events("attempt_ended")[-1]["step"]
    _check_equals_undisturbed_run(run_dir, tmp_path / "alone", data, steps=end)
