"""`Tuner.restore` after the driver was killed: no trial is trained twice, and none loses an evaluation."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.extended]

PROGRAM = """
import os, sys, time
import ray
from ray import tune
from headway.orchestrator import Experiment, trainable
from headway.trainer import CheckpointConfig
from tests.tiny import TinyConfig, TinyTrainer

class Slow(TinyTrainer):
    def on_step_end(self):
        time.sleep(0.1)

if __name__ == "__main__":
    place, checkpoint = os.path.abspath("ray"), CheckpointConfig(every=None, keep_last="all")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    config = TinyConfig(max_steps=40, evaluate_every="4 steps", checkpoint=checkpoint)
    train = trainable(Experiment(name="run", trainer=Slow, config=config, storage="runs"), metric="validation/loss")
    if sys.argv[1] == "start":
        # Two trials end early, and two are in flight when the driver is killed.
        space = {"config.max_steps": tune.grid_search([8, 12, 40, 44])}
        tuner = tune.Tuner(train, param_space=space, run_config=tune.RunConfig(name="run", storage_path=place))
    else:
        tuner = tune.Tuner.restore(f"{place}/run", train, resume_unfinished=True, resume_errored=True)
    for result in tuner.fit():
        assert result.error is None, result.error
        print("reported", list(result.metrics_dataframe["step"]), list(result.metrics_dataframe["training_iteration"]))
"""


def start(folder: Path, how: str) -> subprocess.Popen[str]:
    (folder / "program.py").write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    found = os.pathsep.join([str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "program.py", how], cwd=folder, text=True, start_new_session=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env={**environment, "PYTHONPATH": found, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip


def records(folder: Path) -> dict[int, dict[str, Any]]:
    """The records of the runs by the trial's `config.max_steps`."""
    found = {}
    for run in folder.glob("runs/run/*"):
        trial = json.loads((run / "trial.json").read_text())
        found[trial["values"]["config.max_steps"]] = json.loads((run / "run.json").read_text())
    return found


def test_a_killed_driver_is_restored_without_training_or_reporting_anything_twice(tmp_path: Path) -> None:
    process = start(tmp_path, "start")
    deadline = time.monotonic() + 150
    while len(list(tmp_path.glob("runs/run/*/checkpoints/step-*/manifest.json"))) < 11 and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=100)
    before = records(tmp_path)
    assert [before[steps]["status"] for steps in (8, 12, 40, 44)] == ["completed"] * 2 + ["running"] * 2

    out, _ = start(tmp_path, "restore").communicate(timeout=200)
    after = records(tmp_path)
    assert set(after) == {8, 12, 40, 44}, out
    for steps, record in after.items():
        assert (record["status"], record["steps"]) == ("completed", steps), out
        assert record["attempts"] == (1 if steps < 40 else 2)
        evaluated = list(range(4, steps + 1, 4))
        assert f"reported {evaluated} {list(range(1, len(evaluated) + 1))}" in out
    for steps in (40, 44):
        resumed_from = int(after[steps]["resumed_from"][-8:])
        assert resumed_from >= before[steps]["steps"] >= 4
