"""After its driver, and then a trial, is killed, a sweep resumes: ended trials are not trained again."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headway.orchestrator import Run, SweepResult, sweep
from headway.orchestrator.storage.events import Event, read_events
from headway.orchestrator.storage.folder import Folder
from headway.orchestrator.sweeps.search import resolve_search
from headway.trainer.trackers.jsonl import read_records

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_session")]

# Each takes half a minute on a busy machine.
DRIVERS = int(os.environ.get("HEADWAY_KILLED_DRIVERS", "4"))

TARGET = """
import time
from pathlib import Path

from headway.orchestrator import Experiment, LogUniform, Search
from headway.trainer import CheckpointConfig
from tests.tiny import TinyConfig, TinyTrainer


class Slow(TinyTrainer):
    def training_step(self, batch, batch_idx):
        if self.training and self.run_dir:
            # The first one ends soon; the others wait on their way for the death of the driver.
            is_first = self.run_dir.endswith("000")
            time.sleep(0.005 if is_first else 0.05)
            while not is_first and self.global_step == 30 and not Path(self.run_dir).with_name("go-on").exists():
                time.sleep(0.05)
        return super().training_step(batch, batch_idx)


config = TinyConfig(max_epochs=6, log_every="2 steps", checkpoint=CheckpointConfig(every="6 steps"))
experiment = Experiment(name="sweep", trainer=Slow, config=config, storage="runs")
search = Search(space={"config.learning_rate": LogUniform(1e-4, 1e-1)}, trials=4, concurrent=2, seed=5)
"""


DIGITS = """
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from ray.tune.search.optuna import OptunaSearch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway.orchestrator import Experiment, LogUniform, RandInt, Search
from headway.trainer import CheckpointConfig, Trainer, TrainerConfig


@dataclass(frozen=True, kw_only=True)
class Config(TrainerConfig):
    learning_rate: float = 3e-3
    hidden_size: int = 16


class Digits(Trainer[Config]):
    def configure_models(self):
        size = self.config.hidden_size
        self.model = nn.Sequential(nn.Linear(64, size), nn.ReLU(), nn.Linear(size, 10))

    def configure_optimizers(self):
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.config.learning_rate)

    def configure_dataloaders(self):
        digits = load_digits()
        pixels, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
        train, held_out = TensorDataset(pixels[300:], labels[300:]), TensorDataset(pixels[:300], labels[:300])
        return DataLoader(train, batch_size=32, shuffle=True), DataLoader(held_out, batch_size=100)

    def training_step(self, batch, batch_idx):
        # While drivers are killed, so slowly that they do not finish before.
        if self.training and Path("slow").exists():
            time.sleep(0.05)
        pixels, labels = batch
        return F.cross_entropy(self.model(pixels), labels)


config = Config(max_epochs=2, checkpoint=CheckpointConfig(every="5 steps"))
experiment = Experiment(name="sweep", trainer=Digits, config=config, storage="runs")
search = Search(
    space={"config.learning_rate": LogUniform(1e-4, 1e-1), "config.hidden_size": RandInt(4, 64)},
    algorithm=OptunaSearch(seed=1), trials=8, concurrent=2,
)
"""


def wait_for(condition: Callable[[], bool], alive: Callable[[], bool], told: Callable[[], str]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, told()
        assert alive(), told()
        time.sleep(0.05)


def events(folder: Path, kind: str) -> list[Event]:
    return [event for event in read_events(Folder(str(folder))) if event["event"] == kind]


def test_a_sweep_is_killed_and_so_is_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow.py").write_text(TARGET)
    sweep_dir = tmp_path / "runs/sweep"
    printed = tmp_path / "printed.txt"
    first = start_sweep(tmp_path, "slow.py")
    try:
        # One trial has ended, and another has saved a checkpoint.
        wait_for(
            lambda: bool(events(sweep_dir, "trial_ended") and events(sweep_dir / "trial-001", "checkpoint_saved")),
            lambda: first.poll() is None,
            printed.read_text,
        )
    finally:
        first.kill()
        first.wait()
    (sweep_dir / "go-on").touch()
    ended = {event["trial"] for event in events(sweep_dir, "trial_ended")}
    before = {name: (sweep_dir / name / "run.json").read_text() for name in ended}
    suggested = {event["trial"]: event["values"] for event in events(sweep_dir, "trial_suggested")}
    assert "trial-000" in ended
    assert "trial-003" not in suggested

    killed: list[int] = []

    def kill_a_trial() -> None:
        run_dir = sweep_dir / "trial-003"
        wait_for(lambda: bool(events(run_dir, "checkpoint_saved")), lambda: True, lambda: "trial-003 saved nothing")
        killed.append(json.loads((run_dir / "run.json").read_text())["driver"]["pid"])
        os.kill(killed[0], signal.SIGKILL)

    thread = threading.Thread(target=kill_a_trial)
    thread.start()
    monkeypatch.chdir(tmp_path)
    experiment, search = resolve_search("slow.py", [])
    results = sweep(experiment, search)
    thread.join()

    assert killed
    assert [trial.status for trial in results.trials] == ["completed"] * 4
    # The ended trial is unchanged.
    assert {name: (sweep_dir / name / "run.json").read_text() for name in ended} == before
    # The suggestions are the same, and each was made once.
    assert [event["index"] for event in events(sweep_dir, "trial_suggested")] == [0, 1, 2, 3]
    assert [trial.values for trial in results.trials] == [search.suggest(index) for index in range(4)]
    assert all(trial.values == suggested.get(trial.name, trial.values) for trial in results.trials)
    # The other trials resumed from their checkpoints, after the death of the driver and of the trial.
    for name in ("trial-001", "trial-003"):
        run = Run(str(sweep_dir / name))
        assert (run.record.steps, run.record.attempts) == (72, 2)
        assert run.record.resumed_from is not None
        began = [event["step"] for event in events(sweep_dir / name, "training")]
        assert began[0] == 0
        assert began[1] > 0
        steps = steps_of(sweep_dir / name)
        assert steps == sorted(set(steps))
        assert steps[-1] == 72
    assert sum(len(events(sweep_dir / f"trial-00{index}", "attempt_started")) for index in range(4)) <= 7


@pytest.mark.extended
@pytest.mark.timeout(1800)
def test_drivers_killed_at_random_lose_nothing_of_a_searcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "digits.py").write_text(DIGITS)
    (tmp_path / "slow").touch()
    sweep_dir = tmp_path / "runs/sweep"
    generator = random.Random(17)
    finished: dict[str, str] = {}
    for _ in range(DRIVERS):
        kill_while_trials_train(tmp_path, sweep_dir, generator.uniform(0.0, 1.5))
        finished.update(
            {
                event["trial"]: (sweep_dir / event["trial"] / "run.json").read_text()
                for event in events(sweep_dir, "trial_ended")
                if event["trial"] not in finished
            }
        )
    (tmp_path / "slow").unlink()
    for _ in range(5):
        code = start_sweep(tmp_path, "digits.py").wait(timeout=600)
        if "Ray could not start" not in (printed := (tmp_path / "printed.txt").read_text()):
            break
    assert code == 0, printed

    results = SweepResult.read(str(sweep_dir))
    assert [trial.status for trial in results.trials] == ["completed"] * 8
    assert [event["index"] for event in events(sweep_dir, "trial_suggested")] == list(range(8))
    ended = [event["trial"] for event in events(sweep_dir, "trial_ended")]
    assert sorted(ended) == sorted(set(ended))
    # What had finished was not touched again, and what had not began where it was.
    assert {name: (sweep_dir / name / "run.json").read_text() for name in finished} == finished
    assert any(len(events(sweep_dir / trial.name, "training")) > 1 for trial in results.trials)
    # Each trial is as good as one that was not killed, and so is the best.
    monkeypatch.chdir(tmp_path)
    experiment, search = resolve_search("digits.py", [])
    alone = {}
    for trial in results.trials:
        whole = search.trial(experiment, trial.name, trial.values)
        result = whole.trainer(whole.config, run_dir=str(tmp_path / "alone" / trial.name)).fit()
        alone[trial.name] = result.best_metric
    assert {trial.name: trial.metric for trial in results.trials} == alone
    assert results.best is not None
    assert results.best.metric == min(alone.values())


def start_sweep(folder: Path, target: str) -> subprocess.Popen[bytes]:
    """Start a sweep in another process, which starts Ray itself."""
    with (folder / "printed.txt").open("w") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "headway.orchestrator", "sweep", target],
            cwd=folder, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            env={
                **{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
                "PYTHONPATH": os.pathsep.join((str(Path(__file__).parents[2]), os.environ["PYTHONPATH"])),
            },
        )  # fmt: skip


def kill_while_trials_train(folder: Path, sweep_dir: Path, after_s: float) -> None:
    """Start a sweep, and kill its driver some time after a trial has begun to train."""
    before, printed = len(starts_of(sweep_dir)), folder / "printed.txt"

    def is_decided() -> bool:
        # Ray itself may not start on a busy machine.
        return len(starts_of(sweep_dir)) > before or "Ray could not start" in printed.read_text()

    for _ in range(5):
        driver = start_sweep(folder, "digits.py")
        is_running = partial(lambda process: process.poll() is None or is_decided(), driver)
        try:
            wait_for(is_decided, is_running, printed.read_text)
            time.sleep(after_s)
        finally:
            driver.kill()
            driver.wait()
        if len(starts_of(sweep_dir)) > before:
            return
    raise AssertionError(printed.read_text())


def starts_of(sweep_dir: Path) -> list[Event]:
    """Return the events of trials that have begun to train."""
    return [event for folder in sweep_dir.glob("trial-*") for event in events(folder, "training")]


def steps_of(run_dir: Path) -> list[Any]:
    """Return the steps of the log records."""
    return [record["step"] for record in read_records(run_dir / "metrics.jsonl") if "train/loss" in record]
