"""Two runs and a sweep of one name, beside another program's load on the same cluster: none disturbs another."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import PlacementGroup, placement_group_table

from headway.orchestrator import Run, SweepResult
from tests.machines import machines

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
TARGET = """
import time

from headway.orchestrator import Experiment, LogUniform, Scaling, Search
from headway.trainer import CheckpointConfig
from tests.tiny import TinyConfig, TinyTrainer


class Slow(TinyTrainer):
    def training_step(self, batch, batch_idx):
        time.sleep(0.1 * self.training)
        return super().training_step(batch, batch_idx)


experiment = Experiment(
    name="alike",
    trainer=Slow,
    config=TinyConfig(max_steps=30, checkpoint=CheckpointConfig(every="10 steps")),
    scaling=Scaling(cpus_per_worker=0.25, wait="5m"),
)
search = Search(space={"config.learning_rate": LogUniform(1e-4, 1e-1)}, trials=3, seed=3)
"""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    assert not ray.is_initialized(), "needs its own Ray"
    with machines(monkeypatch, 4) as cluster:
        ray.init(address=cluster.address, namespace="theirs", log_to_driver=False, logging_level="ERROR")
        try:
            yield cluster
        finally:
            ray.shutdown()


@ray.remote(num_cpus=0)
class Busy:
    """An actor with a state, which is lost if it is restarted."""

    def __init__(self) -> None:
        self.calls = 0

    def work(self) -> tuple[int, int]:
        """Return the id of this process, and how often it was called."""
        self.calls += 1
        sum(range(10**6))
        return os.getpid(), self.calls


def theirs() -> tuple[Any, PlacementGroup]:
    """Start a detached actor and a placement group on two of the four CPUs, as another program of the cluster does."""
    actor = Busy.options(name="alike", lifetime="detached", num_cpus=1).remote()  # type: ignore[attr-defined]
    group = ray.util.placement_group([{"CPU": 1}], name="alike", lifetime="detached")
    assert group.wait(120)
    return actor, group


def start(*arguments: str, address: str, folder: Path) -> subprocess.Popen[str]:
    path = os.pathsep.join((str(ROOT / "build/types"), str(ROOT), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTHONPATH": path, "RAY_ADDRESS": address}
    return subprocess.Popen(
        [sys.executable, "-m", "headway.orchestrator", *arguments], cwd=folder, text=True, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def test_two_runs_and_a_sweep_end_and_leave_the_others_alone(cluster: Any, tmp_path: Path) -> None:
    actor, group = theirs()
    pid, calls = ray.get(actor.work.remote())
    before = placement_group_table(group)
    (tmp_path / "target.py").write_text(TARGET)
    processes = [
        start(*arguments, address=cluster.address, folder=tmp_path)
        for arguments in (
            ("fit", "target.py", f"storage={tmp_path}/a", "scaling.workers=2"),
            ("fit", "target.py", f"storage={tmp_path}/b", "scaling.workers=2"),
            ("sweep", "target.py", f"storage={tmp_path}/c"),
        )
    ]
    waiting = True
    while waiting:
        waiting = any(process.poll() is None for process in processes)
        calls += 1
        assert ray.get(actor.work.remote()) == (pid, calls)
    for process in processes:
        output = process.communicate()[0]
        assert process.returncode == 0, output
    for storage in "ab":
        record = Run(f"{tmp_path}/{storage}/alike").record
        assert (record.status, record.steps, record.attempts) == ("completed", 30, 1)
    sweep = SweepResult.read(f"{tmp_path}/c/alike")
    assert [trial.status for trial in sweep.trials] == ["completed"] * 3
    assert placement_group_table(group) == before
    assert before["state"] == "CREATED"
    left = [name for name, each in placement_group_table().items() if each["state"] != "REMOVED"]
    assert left == [group.id.hex()]
    ray.kill(actor)
