"""Ray Tune's schedulers on trials that are Headway runs: stop them with a checkpoint, and copy weights."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ray import tune

from headway.orchestrator import (
    ASHA,
    PBT,
    Choice,
    Experiment,
    HyperBand,
    LogUniform,
    MedianStopping,
    Run,
    Scaling,
    Search,
    sweep,
)
from headway.orchestrator.storage.events import read_events
from headway.orchestrator.storage.folder import Folder
from headway.trainer import Callback, CheckpointConfig, load_weights
from tests.tiny import TinyConfig, TinyTrainer

pytestmark = pytest.mark.usefixtures("ray_session")


class WriteDown(Callback):
    """Records the hyperparameters at the start of an attempt, and makes both trials train concurrently."""

    def on_fit_start(self, trainer: Any) -> None:
        group = trainer.optimizer.param_groups[0]
        line = {
            "step": trainer.global_step,
            "lr": group["lr"],
            "initial_lr": group["initial_lr"],
            "base_lr": trainer.scheduler.base_lrs[0],
            "weights": {name: value.tolist() for name, value in trainer.unwrap(trainer.model).state_dict().items()},
        }
        with Path(trainer.run_dir, "begun.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        deadline = time.monotonic() + 60
        while len(list(Path(trainer.run_dir).parent.glob("*/begun.jsonl"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)

    def on_step_end(self, trainer: Any) -> None:
        time.sleep(0.03)
        if trainer.world.size > 1:
            # PBT lets the worse trial exploit the better one if it has seen the second evaluation of the worse one
            # before the fourth of the better one, and that before the fourth of the worse one.
            folder = Path(trainer.run_dir)
            awaited = {
                ("trial-001", 23): "trial-000-2", ("trial-000", 23): "trial-001-4", ("trial-001", 47): "trial-000-4",
            }.get((folder.name, trainer.global_step))  # fmt: skip
            deadline = time.monotonic() + 120
            while awaited and not (folder.parent / awaited).exists() and time.monotonic() < deadline:
                time.sleep(0.05)


class Note(tune.Callback):  # type: ignore[misc]
    """Touches a file for each evaluation that Ray Tune has received."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **_: Any) -> None:
        (self._folder / f"{trial}-{result['evaluations']}").touch()


class Watched(TinyTrainer):
    def configure_callbacks(self) -> Any:
        return [WriteDown()]


@pytest.mark.parametrize(
    ("scheduler", "rates"),
    [
        (ASHA(reduction=2, max_evaluations=4), [1e-2, 1e-5, 1e-6, 1e-7]),
        (MedianStopping(trials=2), [1e-2, 1e-2, 1e-6, 1e-7, 1e-7]),
        # Six are in brackets that prune before the end; two are not pruned.
        pytest.param(
            HyperBand(reduction=2, max_evaluations=4),
            [1e-2, 1e-2, 1e-2, 1e-5, 1e-6, 1e-6, 1e-7, 1e-7],
            marks=pytest.mark.extended,
        ),
    ],
)
def test_bad_trials_end_early_and_each_of_them_has_a_checkpoint(
    tmp_path: Path, scheduler: Any, rates: list[float]
) -> None:
    experiment = Experiment(name="early", trainer=TinyTrainer, config=TinyConfig(max_epochs=4), storage=str(tmp_path))
    search = Search(
        space={"config.learning_rate": Choice(rates)},
        algorithm="grid",
        # Fewer than there are trials: waiting trials block no others.
        concurrent=2,
        scheduler=scheduler,
    )
    results = sweep(experiment, search)
    stopped = [trial for trial in results.trials if trial.status == "stopped"]
    assert len(stopped) >= 2
    assert {trial.status for trial in results.trials} == {"completed", "stopped"}
    assert all(trial.values["config.learning_rate"] < 1e-2 for trial in stopped)
    assert results.best is not None
    for trial in stopped:
        run = Run(trial.run_dir)
        assert run.reason.startswith(f"pruned by {type(scheduler).__name__} after ")
        assert run.is_finished or trial.has_ended
        assert 0 < run.record.steps < 48
        # With its last state and its evaluation.
        assert str(run.record.last_checkpoint).endswith(f"step-{run.record.steps:08d}")
        assert trial.metric is not None
    assert sum(trial.steps for trial in results.trials) < len(rates) * 48
    again = sweep(experiment, search)
    assert [trial.steps for trial in again.trials] == [trial.steps for trial in results.trials]


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.extended)])
def test_pbt_copies_weights_and_changes_the_learning_rate_in_force(tmp_path: Path, workers: int) -> None:
    experiment = Experiment(
        name="pbt",
        trainer=Watched,
        config=TinyConfig(max_epochs=8, checkpoint=CheckpointConfig(keep_last="all")),
        storage=str(tmp_path),
        scaling=Scaling(workers=workers),
    )
    search = Search(
        space={"config.learning_rate": LogUniform(1e-6, 1e-1)},
        trials=2,
        # Several workers are replaced at each change.
        scheduler=PBT(quantile=0.5, every=1 if workers == 1 else 2),
        seed=3,
        callbacks=[Note(tmp_path / "pbt")] if workers > 1 else [],
    )
    results = sweep(experiment, search)
    assert [trial.status for trial in results.trials] == ["completed", "completed"]
    changes = [event for event in read_events(Folder(results.sweep_dir)) if event["event"] == "trial_changed"]
    assert changes
    last_step = 96 // workers
    # A trial that resumes from a finished one has nothing left to train.
    for change in [change for change in changes if f"step-{last_step:08d}" not in change["checkpoint"]]:
        begun = [
            json.loads(line) for line in Path(tmp_path, "pbt", change["trial"], "begun.jsonl").read_text().splitlines()
        ]
        donor = load_weights(change["checkpoint"])
        rate = change["values"]["config.learning_rate"]
        taken = [
            each
            for each in begun
            if each["initial_lr"] == rate
            and all(torch.equal(torch.tensor(each["weights"][name]), value) for name, value in donor.items())
        ]
        # The donor's weights; its own learning rate, at the donor's position in the schedule.
        assert taken, (change, [(each["step"], each["lr"], each["initial_lr"]) for each in begun])
        factor = (1 + torch.cos(torch.tensor(torch.pi * taken[0]["step"] / 100)).item()) / 2
        assert taken[0]["lr"] == pytest.approx(rate * factor, rel=1e-4)
        assert taken[0]["base_lr"] == rate
        assert str(taken[0]["step"]) in change["checkpoint"]
    last = {change["trial"]: change["values"]["config.learning_rate"] for change in changes}
    for trial in results.trials:
        # Its own best value, although the donor's checkpoint contained the donor's.
        evaluated = [each for each in read_events(Folder(trial.run_dir)) if each["event"] == "evaluated"]
        assert trial.metric == min(each["metrics"]["validation/loss"] for each in evaluated)
        assert trial.run_dir.startswith(str(tmp_path / "pbt"))
        assert Run(trial.run_dir).record.steps == last_step
        if trial.name in last:
            assert trial.config.learning_rate == last[trial.name]
