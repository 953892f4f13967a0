"""On a real cluster of three nodes, the trial of a node that dies resumes on another one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.orchestrator import Run, SweepResult
from headway.orchestrator.storage.events import Event, read_events
from headway.orchestrator.storage.folder import Folder
from headway.trainer.trackers.jsonl import read_records
from tests.machines import machines

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(500)]

ROOT = Path(__file__).parents[2]
TARGET = """
import time
from pathlib import Path

from headway.orchestrator import Choice, Experiment, Search
from headway.trainer import CheckpointConfig
from tests.tiny import TinyConfig, TinyTrainer


class Slow(TinyTrainer):
    def training_step(self, batch, batch_idx):
        # No trial ends before the machine is lost.
        while self.training and self.global_step == 30 and not Path(self.run_dir).with_name("go-on").exists():
            time.sleep(0.05)
        return super().training_step(batch, batch_idx)


config = TinyConfig(max_epochs=4, log_every="2 steps", checkpoint=CheckpointConfig(every="6 steps"))
experiment = Experiment(name="sweep", trainer=Slow, config=config, storage="runs")
search = Search(space={"config.learning_rate": Choice([1e-3, 1e-2, 1e-1])}, algorithm="grid")
"""


def test_the_trial_of_a_dead_machine_goes_on_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(TARGET)
    sweep_dir, printed = tmp_path / "runs/sweep", tmp_path / "printed.txt"

    def events(trial: str, kind: str) -> list[Event]:
        return [each for each in read_events(Folder(str(sweep_dir / trial))) if each["event"] == kind]

    def wait_for(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 200
        while not condition():
            assert driver.poll() is None, printed.read_text()
            assert time.monotonic() < deadline, printed.read_text()
            time.sleep(0.05)

    # Without tests/warm: a worker must be a child of its raylet.
    path = os.pathsep.join((str(ROOT / "build/types"), str(ROOT)))
    monkeypatch.setenv("PYTHONPATH", path)
    with machines(monkeypatch, 2) as cluster, printed.open("w") as file:
        driver = subprocess.Popen(
            [sys.executable, "-m", "headway.orchestrator", "sweep", "slow.py"],
            cwd=tmp_path, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "RAY_ADDRESS": cluster.address},
        )  # fmt: skip
        try:
            # One trial on each node that has room.
            wait_for(lambda: all(len(events(f"trial-00{index}", "checkpoint_saved")) >= 4 for index in (0, 1)))
            survivor, victim = (_pid(sweep_dir / f"trial-00{index}") for index in (0, 1))
            (node,) = [each for each in list(cluster.worker_nodes) if _raylet_of(each) == _parent_of(victim)]
            assert _parent_of(survivor) != _parent_of(victim)
            cluster.remove_node(node, allow_graceful=False)
            wait_for(lambda: not Path(f"/proc/{victim}").exists())
            (sweep_dir / "go-on").touch()
            driver.wait(timeout=240)
        finally:
            driver.kill()
    assert driver.returncode == 0, printed.read_text()

    result = SweepResult.read(str(sweep_dir))
    assert [trial.status for trial in result.trials] == ["completed"] * 3
    assert [Run(trial.run_dir).record.steps for trial in result.trials] == [48] * 3
    assert [Run(trial.run_dir).record.attempts for trial in result.trials] == [1, 2, 1]
    # It resumed from its last checkpoint, and no step is recorded twice.
    first, second = [each["step"] for each in events("trial-001", "training")]
    assert first == 0
    assert second in (24, 30)
    steps = [each["step"] for each in read_records(sweep_dir / "trial-001/metrics.jsonl") if "train/loss" in each]
    assert steps == list(range(2, 49, 2))


def _pid(run_dir: Path) -> int:
    return int(json.loads((run_dir / "run.json").read_text())["driver"]["pid"])


def _parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _raylet_of(node: object) -> int:
    (raylet,) = node.all_processes["raylet"]  # type: ignore[attr-defined]
    return int(raylet.process.pid)
