"""A machine is preempted with notice: all ranks save once, train until it is gone, and resume from there.

Runs in a separate process, on a cluster of two local nodes. `headway node watch` finds the notice in a stand-in for the
metadata service of EC2 and drains one node, which is then removed; another one joins.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from headway.orchestrator import Experiment, RunResult, Scaling, fit
from headway.orchestrator.storage.events import Event, read_events
from headway.orchestrator.storage.folder import Folder
from headway.trainer import CheckpointConfig, Duration
from headway.trainer.trackers.jsonl import read_records
from tests.metadata import MetadataStandIn
from tests.on_ray import OnRay, OnRayConfig

pytestmark = [pytest.mark.ray, pytest.mark.slow]

DEADLINE_S = 30


class Endless(OnRay):
    """A trainer that runs until a file exists."""

    def configure_dataloaders(self) -> Any:
        import torch

        batch = {"id": torch.arange(4), "x": torch.ones(4, 6), "y": torch.zeros(4, dtype=torch.int64)}
        return (lambda: (batch for _ in range(10**9))), None

    def on_step_end(self) -> None:
        if os.path.exists(f"{self.run_dir}/enough"):
            self.request_stop("enough")


def wait_for(what: Any) -> Any:
    deadline = time.monotonic() + 240
    while not (found := what()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def watched(log: Path) -> list[str]:
    """Return the lines of `headway node watch`, once it watches for notices."""
    return [line for line in log.read_text().splitlines() if "watching for notices of aws" in line]


def main(storage: str) -> None:
    """Run the scenario, and print the results."""
    import ray

    from headway.orchestrator.cluster.node_watch import _node_id
    from tests.machines import start_head

    experiment = Experiment(
        name="noticed",
        trainer=Endless,
        config=OnRayConfig(
            data="",
            max_steps=10**6,
            pause_s=0.02,
            log_every=Duration(5, "steps"),
            checkpoint=CheckpointConfig(every=None, at_end=False),
        ),
        scaling=Scaling(workers=2),
        storage=storage,
    )
    folder = Folder(experiment.run_dir)

    def events(kind: str) -> list[Event]:
        return [event for event in read_events(folder) if event["event"] == kind]

    def step() -> int:
        return max((record["step"] for record in read_records(f"{experiment.run_dir}/metrics.jsonl")), default=0)

    # One CPU per node: one worker per node.
    cluster = start_head(num_cpus=1)
    second = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    told: dict[str, Any] = {}

    metadata, watch_log = MetadataStandIn("aws"), Path(storage, "watch.log")
    told["own_node"] = _node_id(cluster.address) in [node["NodeID"] for node in ray.nodes()]
    command = [sys.executable, "-m", "headway.orchestrator", "node", "watch", "--metadata-url", metadata.url]
    command += ["--node-id", second.node_id, "--address", cluster.gcs_address]
    with watch_log.open("w") as log:
        watch = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    results: list[RunResult] = []
    before = signal.getsignal(signal.SIGTERM)
    # Nodes are added in the main thread; a run in another thread does not touch signal handlers.
    trainer = threading.Thread(target=lambda: results.append(fit(experiment)))
    trainer.start()
    try:
        wait_for(lambda: os.path.exists(f"{experiment.run_dir}/metrics.jsonl") and step() >= 20)
        assert signal.getsignal(signal.SIGTERM) is before
        told["watching"] = wait_for(lambda: watched(watch_log))
        noticed_s = time.time()
        at = datetime.fromtimestamp(noticed_s + DEADLINE_S, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        metadata.pages["/latest/meta-data/spot/instance-action"] = json.dumps({"action": "terminate", "time": at})
        saved = wait_for(lambda: events("checkpoint_saved"))
        told["saved_after_s"] = saved[0]["time"] - noticed_s
        wait_for(lambda: step() >= saved[0]["step"] + 20)
        told["saved_until_it_went"] = len(events("checkpoint_saved"))
        cluster.remove_node(second, allow_graceful=False)
        cluster.add_node(num_cpus=1)
        wait_for(lambda: len(events("training")) == 2)
    finally:
        Path(experiment.run_dir, "enough").touch()
        trainer.join()
        watch.send_signal(signal.SIGINT)
        told["watch"] = [watch.wait(), watch_log.read_text()]
        metadata.close()
    (result,) = results
    told |= {
        "status": result.status,
        "endings": [result.attempts, result.preemptions, result.failures],
        "events": [event for event in read_events(folder) if event["event"] not in ("message", "warning")],
    }
    print(json.dumps(told))
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.extended
def test_a_notice_is_heeded_by_all_ranks_and_counts_as_no_failure(tmp_path: Path) -> None:
    program = "import sys; from tests.promises.test_a_notice_costs_nothing import main; main(sys.argv[1])"
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=root,
        timeout=500,
        env={
            **{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
            "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
            "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "1",
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # Ray may print something as it ends.
    told = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    print(f"from the notice to the committed checkpoint: {told['saved_after_s']:.1f} s")
    assert (told["status"], told["endings"]) == ("stopped", [2, 1, 0])
    events: list[Event] = told["events"]
    notice = [event for event in events if event["event"] == "preemption_notice"]
    assert [(event["attempt"], event["saves"], len(event["ranks"])) for event in notice] == [(1, True, 1)]
    assert 0 < notice[0]["deadline_s"] <= DEADLINE_S
    assert told["own_node"]
    code, log = told["watch"]
    assert code == 0, log
    assert re.search(r"EC2 spot interruption \(terminate\), \d+ s left: draining node", log)
    assert "drained the node" in log
    assert told["saved_until_it_went"] == 1, "every rank saves the same step exactly once"
    saved = next(event for event in events if event["event"] == "checkpoint_saved")
    assert told["saved_after_s"] < DEADLINE_S
    assert next(event for event in events if event["event"] == "restored")["step"] == saved["step"]
