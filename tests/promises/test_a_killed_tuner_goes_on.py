"""`Tuner.restore` after the driver was killed: no trial is trained twice, and none loses an evaluation.

Failed trials resume from their newest checkpoints with `resume_errored`, or start over with `restart_errored`.
"""

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
import torch

from headway.trainer import Duration, World, load_weights
from tests.tiny import TinyConfig, TinyTrainer

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
        if self.global_step == 10 and self.config.max_steps == 24 and not os.path.exists("mended"):
            raise ValueError("a bad batch")
        time.sleep(0.1)

if __name__ == "__main__":
    place, checkpoint = os.path.abspath("ray"), CheckpointConfig(every=None, keep_last="all")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    config = TinyConfig(max_steps=40, evaluate_every="4 steps", checkpoint=checkpoint)
    train = trainable(Experiment(name="run", trainer=Slow, config=config, storage="runs"), metric="validation/loss")
    how, *steps = sys.argv[1:]
    if how == "start":
        space = {"config.max_steps": tune.grid_search([int(each) for each in steps])}
        tuner = tune.Tuner(train, param_space=space, run_config=tune.RunConfig(name="run", storage_path=place))
    else:
        tuner = tune.Tuner.restore(f"{place}/run", train, resume_unfinished=True, **{how: True})
    for result in tuner.fit():
        assert result.error is None, result.error
        print("reported", list(result.metrics_dataframe["step"]), list(result.metrics_dataframe["training_iteration"]))
        print("pointers", [metrics["step"] for _, metrics in result.best_checkpoints], "to", result.metrics["step"])
"""


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    (folder / "program.py").write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    found = os.pathsep.join([str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")])
    environment |= {"PYTHONPATH": found, "PYTHONUNBUFFERED": "1", "TUNE_GLOBAL_CHECKPOINT_S": "1"}
    return subprocess.Popen(
        [sys.executable, "program.py", *arguments], cwd=folder, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment,
    )  # fmt: skip


def records(folder: Path) -> dict[int, dict[str, Any]]:
    """The records of the runs by the trial's `config.max_steps`."""
    found = {}
    for run in folder.glob("runs/run/*"):
        trial = json.loads((run / "trial.json").read_text())
        found[trial["values"]["config.max_steps"]] = json.loads((run / "run.json").read_text())
    return found


def test_a_killed_driver_is_restored_without_training_or_reporting_anything_twice(tmp_path: Path) -> None:
    # Two trials end early, and two are in flight when the driver is killed.
    process = start(tmp_path, "start", "8", "12", "40", "44")
    deadline = time.monotonic() + 150
    while len(list(tmp_path.glob("runs/run/*/checkpoints/step-*/manifest.json"))) < 11 and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=100)
    before = records(tmp_path)
    assert [before[steps]["status"] for steps in (8, 12, 40, 44)] == ["completed"] * 2 + ["running"] * 2

    out, _ = start(tmp_path, "resume_errored").communicate(timeout=200)
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


@pytest.mark.parametrize("how", ["resume_errored", "restart_errored"])
def test_a_failed_trial_resumes_or_starts_over_after_the_driver_was_killed(tmp_path: Path, how: str) -> None:
    process = start(tmp_path, "start", "8", "24", "60")
    deadline = time.monotonic() + 150
    # Ray Tune has recorded the failure, and the last trial is in flight, with the checkpoints of steps 4 and 8 each.
    while process.poll() is None and not (
        any("ERROR" in file.read_text() for file in tmp_path.glob("ray/run/experiment_state-*.json"))
        and len(list(tmp_path.glob("runs/run/*/checkpoints/step-*/manifest.json"))) >= 6
    ):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=100)
    before = records(tmp_path)
    assert [before[steps]["status"] for steps in (8, 24, 60)] == ["completed", "failed", "running"]
    (failed,) = [
        run.name for run in tmp_path.glob("runs/run/*") if json.loads((run / "run.json").read_text()) == before[24]
    ]

    (tmp_path / "mended").touch()
    out, _ = start(tmp_path, how).communicate(timeout=200)
    for steps in (8, 24, 60):
        assert f"pointers {list(range(4, steps + 1, 4))} to {steps}" in out
    alone = TinyTrainer(
        TinyConfig(max_steps=24, evaluate_every=Duration(4, "steps")), run_dir=str(tmp_path / "alone"),
        world=World.single("cpu"), show_progress=False,
    ).fit()  # fmt: skip
    runs = {run.name: json.loads((run / "run.json").read_text()) for run in tmp_path.glob("runs/run/*")}
    others = [name for name, record in runs.items() if record["steps"] == 24 and name != failed]
    weights = load_weights(runs[others[0] if others else failed]["last_checkpoint"])
    expected = load_weights(str(alone.last_checkpoint))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    if how == "resume_errored":
        assert others == []
        assert runs[failed]["resumed_from"].endswith("step-00000008")
        assert (runs[failed]["status"], runs[failed]["attempts"]) == ("completed", 2)
    else:
        # Ray Tune makes a new trial of it, without its checkpoint.
        (other,) = others
        assert (runs[other]["status"], runs[other]["resumed_from"], runs[other]["attempts"]) == ("completed", None, 1)
        assert runs[failed]["status"] == "failed"
