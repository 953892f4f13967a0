"""On a real cluster without machines, a sweep waits for the first one, and also uses the second one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.orchestrator import SweepResult
from headway.orchestrator.storage.events import read_events
from headway.orchestrator.storage.folder import Folder
from tests.machines import machines

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
TARGET = """
import time
from pathlib import Path

from headway.orchestrator import Choice, Experiment, Scaling, Search
from tests.tiny import TinyConfig, TinyTrainer


class Slow(TinyTrainer):
    def training_step(self, batch, batch_idx):
        # No trial ends before another one trains, too.
        while self.training and not Path(self.run_dir).with_name("go-on").exists():
            time.sleep(0.05)
        return super().training_step(batch, batch_idx)


experiment = Experiment(
    name="sweep", trainer=Slow, config=TinyConfig(max_epochs=1), scaling=Scaling(wait="5m"), storage="runs"
)
search = Search(space={"config.learning_rate": Choice([1e-3, 1e-2])}, algorithm="grid")
"""


def test_a_sweep_waits_for_its_first_machine_and_takes_the_second_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(TARGET)
    sweep_dir, printed = tmp_path / "runs/sweep", tmp_path / "printed.txt"

    def trains(trial: str) -> bool:
        return any(each["event"] == "training" for each in read_events(Folder(str(sweep_dir / trial))))

    def wait_for(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 150
        while not condition():
            assert driver.poll() is None, printed.read_text()
            assert time.monotonic() < deadline, printed.read_text()
            time.sleep(0.05)

    path = os.pathsep.join((str(ROOT / "build/types"), str(ROOT), os.environ["PYTHONPATH"]))
    monkeypatch.setenv("PYTHONPATH", path)
    with machines(monkeypatch, 0) as cluster, printed.open("w") as file:
        driver = subprocess.Popen(
            [sys.executable, "-m", "headway.orchestrator", "sweep", "slow.py"],
            cwd=tmp_path, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "RAY_ADDRESS": cluster.address, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        try:
            wait_for(lambda: "waiting for 1 worker: none fits (0 CPU free of 0)\n" in printed.read_text())
            cluster.add_node(num_cpus=1)
            wait_for(lambda: trains("trial-000"))
            assert not (sweep_dir / "trial-001").exists()
            cluster.add_node(num_cpus=1)
            wait_for(lambda: trains("trial-001"))
            (sweep_dir / "go-on").touch()
            driver.wait(timeout=300)
        finally:
            driver.kill()
    assert driver.returncode == 0, printed.read_text()
    assert "0 CPUs: 1 concurrent trial of 1 worker, of which none fit now\n" in printed.read_text()
    assert "2 CPUs: 2 concurrent trials of 1 worker\n" in printed.read_text()
    assert [trial.status for trial in SweepResult.read(str(sweep_dir)).trials] == ["completed"] * 2
