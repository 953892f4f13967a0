"""Sweeps on a real Ray: trials, failures, the best trial, and that nothing is done twice."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from ray import tune

from headway.orchestrator import ASHA, Choice, Experiment, Retries, Run, Scaling, Search, sweep
from headway.orchestrator.runs.stop import stop_run
from headway.orchestrator.storage.events import read_events
from headway.orchestrator.storage.folder import Folder
from headway.trainer import CheckpointConfig
from tests.tiny import TinyConfig, TinyTrainer

pytestmark = pytest.mark.usefixtures("ray_session")


class Picky(TinyTrainer):
    """Width 6 dies, 7 fails, and 8 returns NaN. Widths 8 and 9 wait for each other."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.training and self.config.width in (8, 9) and self.global_step == 0:
            self._meet()
        if self.training and self.config.width == 7 and self.global_step == 2:
            raise ValueError("no width of 7")
        if self.training and self.config.width == 6 and self.global_step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        step = super().training_step(batch, batch_idx)
        if not self.training and self.config.width == 8:
            return {**step, "loss": step["loss"] * math.nan}
        return step

    def _meet(self) -> None:
        assert self.run_dir is not None
        Path(self.run_dir, "here").touch()
        deadline = time.monotonic() + 120
        while len(list(Path(self.run_dir).parent.glob("*/here"))) < 2:
            assert time.monotonic() < deadline, "no other trial trains beside this one"
            time.sleep(0.02)


class OfTheUser(tune.Callback):  # type: ignore[misc]
    """Records Ray Tune's callbacks."""

    completed: ClassVar[list[str]] = []

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self.completed.append(str(trial))


def test_a_grid_of_runs_one_of_which_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Ray Tune must not import MLflow before the first trial.
    monkeypatch.setitem(sys.modules, "ray.air.integrations.mlflow", None)
    monkeypatch.setenv("RAY_TUNE_CALLBACKS", "tests.orchestrator.sweeps.test_sweep.OfTheUser")
    experiment = Experiment(name="grid", trainer=Picky, config=TinyConfig(max_epochs=2), storage=str(tmp_path))
    search = Search(
        space={"config.width": Choice([7, 8, 9, 10]), "config.freeze": Choice([["*.bias"]])},
        algorithm="grid",
        concurrent=2,
    )

    def of_tune() -> tuple[dict[str, str], int]:
        settings = {
            name: value for name, value in os.environ.items() if name.startswith(("TUNE_", "RAY_AIR_", "RAY_TUNE_"))
        }
        return settings, logging.getLogger("ray.tune").level

    before = of_tune()
    results = sweep(experiment, search)

    # Ray Tune's settings in this process are restored.
    assert of_tune() == before
    # Only Headway prints progress, and a user's callback is called.
    assert "Last result" not in capsys.readouterr().out
    assert sorted(OfTheUser.completed) == [f"trial-{index:03}" for index in range(4)]

    # Each trial is a run with its config; a list is one value.
    assert results.status == "completed"
    assert [trial.config.width for trial in results.trials] == [7, 8, 9, 10]
    assert {trial.config.freeze for trial in results.trials} == {("*.bias",)}
    for trial in results.trials[1:]:
        run = Run(trial.run_dir)
        assert (run.status, run.record.steps, run.record.attempts) == ("completed", 24, 1)
        steps = [json.loads(line)["step"] for line in Path(trial.run_dir, "metrics.jsonl").read_text().splitlines()]
        assert steps == sorted(steps)

    # The failed one did not affect the others, and has its error.
    (failed,) = results.failed
    assert failed.name == "trial-000"
    assert "no width of 7" in (failed.error or "")

    # NaN is never best, and the table has a row for each trial.
    assert results.trials[1].metric is None
    assert results.best is not None
    assert results.best.metric == min(trial.metric for trial in results.trials[2:] if trial.metric is not None)
    assert results.table.columns()["config.width"] == [7, 8, 9, 10]

    # At most two at a time.
    spans = []
    for trial in results.trials:
        events = read_events(Run(trial.run_dir).folder)
        spans.append((min(each["time"] for each in events), max(each["time"] for each in events)))
    assert max(sum(begin <= at < end for begin, end in spans) for at, _ in spans) == 2

    # The same call again trains nothing.
    again = sweep(experiment, search)
    assert again.table == results.table or str(again.table) == str(results.table)
    assert [Run(trial.run_dir).record.started for trial in again.trials] == [
        Run(trial.run_dir).record.started for trial in results.trials
    ]

    # A plain script can load the best checkpoint, without Ray.
    script = (
        "import sys; sys.modules['ray'] = None\n"
        "from tests.tiny import TinyConfig, TinyTrainer\n"
        f"trainer = TinyTrainer(TinyConfig(max_epochs=2, width={results.best.values['config.width']}))\n"
        f"print(trainer.evaluate(checkpoint={results.best.checkpoint!r})['validation/loss'])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    torch.testing.assert_close(float(done.stdout), results.best.metric, rtol=1e-5, atol=1e-6)


def test_a_trial_whose_process_dies_too_often_says_so(tmp_path: Path) -> None:
    experiment = Experiment(
        name="dies", trainer=Picky, config=TinyConfig(max_epochs=1), retries=Retries(max_failures=0),
        storage=str(tmp_path),
    )  # fmt: skip
    results = sweep(experiment, Search(space={"config.width": Choice([6, 10])}, algorithm="grid", concurrent=1))
    assert [trial.status for trial in results.trials] == ["failed", "completed"]
    assert "died" in (results.trials[0].error or "")


@pytest.mark.parametrize(
    "workers", [pytest.param(2, id="fixed"), pytest.param((1, 2), id="elastic", marks=pytest.mark.extended)]
)
def test_trials_of_several_workers(tmp_path: Path, workers: int | tuple[int, int]) -> None:
    """Two trials of two workers each fill the four CPUs; the checkpoints of the worse one are deleted."""
    experiment = Experiment(
        name="wide",
        trainer=TinyTrainer,
        config=TinyConfig(max_epochs=2, global_batch_size=16),
        scaling=Scaling(workers=workers),
        storage=str(tmp_path),
    )
    search = Search(
        space={"config.learning_rate": Choice([1e-2, 1e-6])}, algorithm="grid", scheduler=ASHA(), keep_best_trials=1
    )
    results = sweep(experiment, search)
    assert [trial.status for trial in results.trials] in (["completed", "completed"], ["completed", "stopped"])
    for trial in results.trials:
        (attempt,) = [each for each in read_events(Run(trial.run_dir).folder) if each["event"] == "attempt_started"]
        assert attempt["world_size"] == 2
    assert results.best is not None
    assert Path(results.best.checkpoint or "", "manifest.json").exists()
    (worse,) = [trial for trial in results.trials if trial != results.best]
    assert worse.checkpoint is None
    assert list(Path(worse.run_dir, "checkpoints").glob("step-*")) == []


class Unhurried(TinyTrainer):
    """Trains until it is stopped."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.02 if self.training else 0)
        return super().training_step(batch, batch_idx)


def test_a_sweep_is_stopped_from_outside_and_goes_on(tmp_path: Path) -> None:
    # Saves only at its end. It reports nothing before: Ray Tune answers a report during an abort with a pause,
    # which saves.
    config = TinyConfig(max_steps=100_000, evaluate_every="50000 steps", checkpoint=CheckpointConfig(every=None))
    experiment = Experiment(name="long", trainer=Unhurried, config=config, storage=str(tmp_path))
    search = Search(space={"config.learning_rate": Choice([1e-2, 1e-3, 1e-4])}, algorithm="grid", concurrent=2)

    def train_until(stop: Callable[[], str]) -> tuple[str, Any]:
        """Start both trials, stop the sweep, and return the output and the result."""
        began, results = time.time(), []
        thread = threading.Thread(target=lambda: results.append(sweep(experiment, search)))
        thread.start()
        for name in ("trial-000", "trial-001"):
            folder = Folder(str(tmp_path / "long" / name))
            while not any(each["event"] == "training" and each["time"] > began for each in read_events(folder)):
                assert thread.is_alive()
                time.sleep(0.05)
        said = stop()
        thread.join()
        return said, results[0]

    # Both save and end; no other trial starts.
    said, first = train_until(lambda: stop_run("long", str(tmp_path), wait=True))
    assert said == "long has ended: stopped with 0 of 3 trials done (headway runs stop); to resume, start it again"
    assert (first.status, [trial.status for trial in first.trials]) == ("stopped", ["interrupted"] * 2)
    saved = [trial.steps for trial in first.trials]
    for trial in first.trials:
        assert str(trial.last_checkpoint).endswith(f"step-{trial.steps:08d}")
        assert trial.steps > 0

    # They resume from there, and are aborted without a checkpoint.
    _, second = train_until(lambda: stop_run("long", str(tmp_path), now=True))
    assert (second.status, second.reason) == ("stopped", "headway runs stop, immediately")
    assert [trial.status for trial in second.trials] == ["interrupted"] * 2
    assert [trial.steps for trial in second.trials] == saved
    for trial, steps in zip(second.trials, saved, strict=True):
        events = read_events(Run(trial.run_dir).folder)
        assert [each["step"] for each in events if each["event"] == "training"] == [0, steps]
    assert all(each["event"] != "trial_ended" for each in read_events(Folder(second.sweep_dir)))
