"""Checkpoints are evaluated in a worker of their own while the others go on training."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch.utils.data import DataLoader

from headway.orchestrator import Experiment, RunResult, Scaling, fit
from headway.orchestrator.cluster.connect import check_resources
from headway.orchestrator.display.console import RunConsole
from headway.orchestrator.storage.events import read_events
from headway.orchestrator.storage.folder import Folder
from headway.trainer import Callback, CheckpointConfig, ConfigError
from tests.tiny import Rows, TinyConfig, TinyTrainer

WAIT_S = 90.0


@dataclass(frozen=True, kw_only=True)
class Config(TinyConfig):
    folder: str = ""
    breaks: bool = False
    after: str = "reads-*"


def _wait_for(folder: Path, pattern: str) -> Path:
    began = time.monotonic()
    while not (found := list(folder.glob(pattern))):
        assert time.monotonic() - began < WAIT_S, f"there is no {pattern}"
        time.sleep(0.05)
    return found[0]


class ValidationRows(Rows):
    """Says that it is read, and waits for the file `trained`, which training makes after update 35."""

    def __init__(self, config: Config) -> None:
        super().__init__(10)
        self.config = config

    def __getitem__(self, row: int) -> Any:
        folder = Path(self.config.folder)
        if row == 0:
            (folder / f"reads-{os.getpid()}").touch()
            if self.config.breaks and not (folder / "last").exists():
                raise ValueError("no such image")
            _wait_for(folder, "trained")
        return super().__getitem__(row)


class StopOnceKnown(Callback):
    """Stops the run at the first record that has metrics of the other worker."""

    def on_step_end(self, trainer: Any) -> None:
        time.sleep(0.02)
        folder = Path(trainer.config.folder)
        if trainer.global_step == 30:
            _wait_for(folder, trainer.config.after)
        elif trainer.global_step == 35:
            (folder / "trained").touch()
        elif trainer.global_step == trainer.config.max_steps:
            (folder / "last").touch()

    def on_log(self, trainer: Any, metrics: Any) -> None:
        if "evaluated_step" in metrics:
            trainer.request_stop(f"evaluated {metrics['evaluated_step']:g} {metrics['validation/loss']!r}")


class Evaluated(TinyTrainer):
    config: Config

    def configure_dataloaders(self) -> Any:
        return DataLoader(Rows(103), batch_size=8), DataLoader(ValidationRows(self.config), batch_size=3)

    def configure_callbacks(self) -> Any:
        return [StopOnceKnown()]


def _experiment(folder: Path, *, breaks: bool = False, **changes: Any) -> Experiment:
    config = {
        "max_steps": 3000, "evaluate_every": None, "log_every": "1 steps", "folder": str(folder), "breaks": breaks,
        "checkpoint": CheckpointConfig(every="10 steps", keep_last="all"), **changes,
    }  # fmt: skip
    scaling = Scaling(cpus_per_worker=0.5, evaluation_worker={"CPU": 0.5})
    return Experiment(name="run", trainer=Evaluated, config=Config(**config), scaling=scaling, storage=str(folder))


def _fit(experiment: Experiment) -> tuple[RunResult, list[dict[str, Any]], str]:
    screen = io.StringIO()
    result = fit(experiment, display=RunConsole(Console(file=screen, width=200)))
    return result, read_events(Folder(experiment.run_dir)), screen.getvalue()


@pytest.mark.ray
def test_training_goes_on_during_an_evaluation_and_gets_its_metrics(ray_session: None, tmp_path: Path) -> None:
    experiment = _experiment(tmp_path)
    result, events, screen = _fit(experiment)
    first = next(event for event in events if event["event"] == "evaluated")
    # It began before update 31 and ended after update 35, so training did not wait for it.
    assert first["step"] <= 30
    assert len(list(tmp_path.glob("reads-*"))) == 1, "the training worker has evaluated too"
    alone = Evaluated(experiment.config)
    assert first["metrics"] == alone.evaluate(checkpoint=first["checkpoint"])
    evaluated = [event for event in events if event["event"] == "evaluated"]
    assert result.reason in [f"evaluated {each['step']} {each['metrics']['validation/loss']!r}" for each in evaluated]
    assert f"step {first['step']} · validation/accuracy {first['metrics']['validation/accuracy']:.4g}" in screen


@pytest.mark.extended
@pytest.mark.ray
def test_an_evaluation_worker_that_dies_is_replaced(ray_session: None, tmp_path: Path) -> None:
    def kill() -> None:
        os.kill(int(_wait_for(tmp_path, "reads-*").name.removeprefix("reads-")), signal.SIGKILL)
        (tmp_path / "killed").touch()

    killer = threading.Thread(target=kill)
    killer.start()
    result, events, screen = _fit(_experiment(tmp_path, after="killed"))
    killer.join()
    assert result.reason.startswith("evaluated")
    step = next(event for event in events if event["event"] == "evaluation_failed")["step"]
    assert step <= 30
    assert f"step {step} not evaluated: " in screen
    assert result.attempts == 1


@pytest.mark.extended
@pytest.mark.ray
def test_a_checkpoint_that_cannot_be_evaluated_fails_no_run(ray_session: None, tmp_path: Path) -> None:
    result, events, _ = _fit(_experiment(tmp_path, breaks=True, max_steps=45))
    assert (result.status, result.steps) == ("completed", 45)
    failed = [event for event in events if event["event"] == "evaluation_failed"]
    assert failed
    assert "ValueError: no such image" in failed[0]["error"]
    # The training workers evaluate the last state themselves.
    assert "validation/loss" in result.metrics


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluate_every": "1 epochs"}, "set config.evaluate_every=None"),
        ({"checkpoint": CheckpointConfig(every=None)}, "set it to the interval of the evaluations"),
    ],
)
def test_settings_that_make_training_wait_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _experiment(tmp_path, **changes)


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        ({"CPU": 1000.0}, "needs 1000 CPUs"),
        ({"gizmo": 1.0}, "needs gizmo, which this machine has not"),
        ({}, "must name resources"),
        ({"CPU": 0.0}, "must be > 0"),
    ],
)
def test_resources_are_checked(monkeypatch: pytest.MonkeyPatch, resources: dict[str, float], message: str) -> None:
    monkeypatch.setattr("headway.orchestrator.cluster.connect.will_start_own_ray", lambda: True)
    with pytest.raises(ConfigError, match=message):
        check_resources(Scaling(evaluation_worker=resources))
