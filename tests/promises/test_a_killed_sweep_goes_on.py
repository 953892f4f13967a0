"""After its driver, and then a trial, is killed, a sweep resumes: ended trials are not trained again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.orchestrator import Run, sweep
from headway.orchestrator.storage.events import Event, read_events
from headway.orchestrator.storage.folder import Folder
from headway.orchestrator.sweeps.search import resolve_search
from headway.trainer.trackers.jsonl import read_records

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_session")]

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
    with printed.open("w") as file:
        first = subprocess.Popen(
            [sys.executable, "-m", "headway.orchestrator", "sweep", "slow.py"],
            cwd=tmp_path, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            env={
                **{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
                "PYTHONPATH": os.pathsep.join((str(Path(__file__).parents[2]), os.environ["PYTHONPATH"])),
            },
        )  # fmt: skip
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


def steps_of(run_dir: Path) -> list[Any]:
    """Return the steps of the log records."""
    return [record["step"] for record in read_records(run_dir / "metrics.jsonl") if "train/loss" in record]
