"""`trainable` inside a `Tuner` of the user's: schedulers, searchers, results, and a `Tuner` that is restored."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search.optuna import OptunaSearch
from ray.tune.search.repeater import TRIAL_INDEX

from headway.orchestrator import Experiment, Run, Scaling, Search, checkpoint_path, fit, sweep, train_loop, trainable
from headway.orchestrator.runs.metric_history import metric_by_step
from headway.orchestrator.runs.pointer import Pointer, write_pointer
from headway.orchestrator.runs.resume import ResumeOptions
from headway.orchestrator.sweeps.tune import trainable as theirs
from headway.orchestrator.sweeps.tune.trainable import run_trial
from headway.orchestrator.train.train_loop import Start
from headway.trainer import CheckpointConfig, ConfigError, Duration
from tests.tiny import TinyConfig, TinyTrainer


def experiment(storage: Path, **config: Any) -> Experiment:
    settings: dict[str, Any] = {
        "max_steps": 12, "evaluate_every": Duration(4, "steps"), "checkpoint": CheckpointConfig(every=None), **config,
    }  # fmt: skip
    return Experiment(name="tiny", trainer=TinyTrainer, config=TinyConfig(**settings), storage=str(storage / "runs"))


class Tune:
    """Stands in for Ray Tune around one trial: keeps the reports, and ends the trial inside one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, ends_at: int | None = None) -> None:
        self.reports: list[dict[str, Any]] = []
        self.pointers: list[dict[str, str] | None] = []
        # The metrics in the run's record when each report is made: Ray Tune may end the process inside it.
        self.records: list[dict[str, float]] = []
        self.storage = ""
        self.checkpoint: tune.Checkpoint | None = None
        self.name, self.trial_id, self._ends_at = "tiny_1", "1", ends_at
        monkeypatch.setattr(tune, "report", self._report)
        monkeypatch.setattr(tune, "get_checkpoint", lambda: self.checkpoint)
        self.resources = tune.PlacementGroupFactory([{"CPU": 1}])
        context = SimpleNamespace(
            get_trial_name=lambda: self.name,
            get_trial_id=lambda: self.trial_id,
            get_trial_resources=lambda: self.resources,
        )
        monkeypatch.setattr(tune, "get_context", lambda: context)

    def _report(self, metrics: Mapping[str, Any], checkpoint: tune.Checkpoint | None = None) -> None:
        self.reports.append(dict(metrics))
        self.records.append(Run(f"{self.storage}/{self.name}").record.metrics)
        self.pointers.append(checkpoint and json.loads(Path(checkpoint.path, "headway.json").read_text()))
        if metrics["step"] == self._ends_at:
            raise SystemExit(0)

    def train(self, ours: Experiment, config: dict[str, Any], metric: str | None = "validation/loss") -> None:
        self.storage = ours.run_dir
        run_trial(Start.of(ours, ResumeOptions(accept_changes=True)), config, metric)

    def give(self, pointer: Pointer, folder: Path) -> None:
        folder.mkdir()
        write_pointer(pointer, str(folder))
        self.checkpoint = tune.Checkpoint.from_directory(str(folder))


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (TinyTrainer, "got the class TinyTrainer: pass Experiment.name=..., trainer=TinyTrainer, c"),
        (3, "got 3: pass E"),
    ],
)
@pytest.mark.parametrize("make", [trainable, train_loop, fit, lambda each: sweep(each, Search(space={"a": [1, 2]}))])
def test_what_is_no_experiment_is_refused(make: Any, given: Any, shown: str) -> None:
    with pytest.raises(ConfigError, match=f"experiment must be an Experiment, {shown}"):
        make(given)


def test_a_metric_that_is_no_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="metric must be a name such as 'validation/loss', or None, got 3"):
        trainable(experiment(tmp_path), metric=3)  # type: ignore[arg-type]


def test_each_evaluation_is_reported_once_with_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    around, ours = Tune(monkeypatch), experiment(tmp_path)
    around.train(ours, {"config.learning_rate": 0.1})
    run = Run(f"{ours.run_dir}/tiny_1")
    assert [report["step"] for report in around.reports] == [4, 8, 12]
    assert around.reports[-1]["validation/loss"] == run.record.metrics["validation/loss"]
    assert all("validation/loss" in record for record in around.records)
    assert around.records[-1]["validation/loss"] == around.reports[-1]["validation/loss"]
    assert [pointer and Path(pointer["checkpoint"]).name for pointer in around.pointers] == [
        "step-00000004", "step-00000008", "step-00000012",
    ]  # fmt: skip
    assert run.experiment().config.learning_rate == 0.1

    # As after `Tuner.restore`, whose last snapshot may be of before the end.
    around.reports.clear()
    around.train(ours, {"config.learning_rate": 0.1})
    assert [report["step"] for report in around.reports] == [4, 8, 12]
    around.reports.clear()
    around.give(Pointer(**around.pointers[-1]), tmp_path / "own")  # type: ignore[arg-type]
    around.train(ours, {"config.learning_rate": 0.1})
    assert [report["step"] for report in around.reports] == [12]


class Reports(TinyTrainer):
    def on_epoch_end(self, metrics: Any) -> None:
        tune.report({"mine": 1.0})


def test_a_report_in_the_code_of_a_trainer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    around = Tune(monkeypatch)
    with pytest.raises(ConfigError, match=r"ray\.tune\.report\(\) was called in the trainer's code.*self\.log\(name"):
        around.train(replace(experiment(tmp_path), trainer=Reports), {})
    assert all("step" in report for report in around.reports)


class ReadsCheckpoint(TinyTrainer):
    """Loads weights from Ray's checkpoint, as a function for Ray Tune does."""

    def configure_models(self) -> None:
        super().configure_models()
        if checkpoint := tune.get_checkpoint():
            with checkpoint.as_directory() as folder:
                self.model.load_state_dict(torch.load(Path(folder) / "model.pt"))


def test_the_code_of_a_trainer_finds_no_pointer_where_it_expects_its_own_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    around, ours = Tune(monkeypatch, ends_at=8), replace(experiment(tmp_path, max_steps=40), trainer=ReadsCheckpoint)
    with pytest.raises(SystemExit), pytest.warns(UserWarning, match=r"ray\.tune\.get_checkpoint\(\) returns None in"):
        around.train(ours, {})
    resumed = Tune(monkeypatch)
    resumed.give(Pointer(**around.pointers[-1]), tmp_path / "own")  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="Headway itself restores models"):
        resumed.train(ours, {})
    assert resumed.reports[-1]["step"] == 40
    assert Run(f"{ours.run_dir}/tiny_1").record.attempts == 2


def test_a_trial_that_tune_ends_is_interrupted_and_goes_on_when_it_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    around, ours = Tune(monkeypatch, ends_at=8), experiment(tmp_path, max_steps=40)
    with pytest.raises(SystemExit):
        around.train(ours, {})
    run = Run(f"{ours.run_dir}/tiny_1")
    assert (run.status, run.reason) == ("interrupted", "ended or paused by Ray Tune")
    assert around.reports[-1]["step"] == 8

    resumed = Tune(monkeypatch)
    resumed.give(Pointer(**around.pointers[-1]), tmp_path / "own")  # type: ignore[arg-type]
    resumed.train(ours, {})
    steps = [report["step"] for report in resumed.reports]
    assert steps == list(range(steps[0], 41, 4))
    assert steps[0] > 8
    assert Run(run.run_dir).record.attempts == 2


def test_a_trial_goes_on_from_the_checkpoint_of_another_with_its_own_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    around, ours = Tune(monkeypatch), experiment(tmp_path, max_steps=8)
    around.train(ours, {"config.learning_rate": 0.1})
    donor = around.pointers[0]
    assert donor is not None
    other = Tune(monkeypatch)
    other.name = "tiny_2"
    other.give(Pointer(**donor), tmp_path / "donor")
    other.train(ours, {"config.learning_rate": 0.02})
    run = Run(f"{ours.run_dir}/tiny_2")
    assert [report["step"] for report in other.reports] == [8]
    assert run.record.resumed_from == donor["checkpoint"]
    assert 0 < run.record.metrics["lr"] < 0.02


class DiesAfterASave(TinyTrainer):
    """Its process is killed when a checkpoint is complete and nothing has heard of it yet."""

    def on_checkpoint_saved(self, checkpoint: Any) -> None:
        if self.attempt == 1 and checkpoint.step == 8:
            os.kill(os.getpid(), signal.SIGKILL)


class Results(tune.Callback):
    """Collects what Ray Tune gets. Its files may lack a row: a restarted trial continues copies of them."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        self.all.append(result)


@pytest.mark.ray
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.extended)])
def test_a_trial_that_dies_just_after_a_save_reports_its_evaluation_when_it_resumes(
    tmp_path: Path, ray_session: None, workers: int
) -> None:
    ours = experiment(tmp_path, log_every="4 steps", checkpoint=CheckpointConfig(every=None, keep_last="all"))
    ours = replace(ours, trainer=DiesAfterASave, scaling=Scaling(workers=workers))
    reports = Results()
    results = tune.Tuner(
        trainable(ours, metric="validation/loss"),
        run_config=tune.RunConfig(
            storage_path=str(tmp_path / "ray"),
            verbose=0,
            failure_config=tune.FailureConfig(max_failures=1),
            callbacks=[reports],
        ),
    ).fit()
    assert results.num_errors == 0
    (run,) = [Run(str(file.parent)) for file in Path(ours.run_dir).glob("*/run.json")]
    assert run.record.attempts == 2
    assert [(each["step"], each["evaluations"]) for each in reports.all] == [(4, 1), (8, 2), (12, 3)]
    losses = list(metric_by_step(run.folder, "validation/loss").values())
    assert [each["validation/loss"] for each in reports.all] == losses
    if workers == 1:
        assert all("train/loss" in each for each in reports.all)
    paths = [checkpoint_path(checkpoint) for checkpoint, _ in results[0].best_checkpoints]
    assert [Path(path).name for path in paths] == ["step-00000004", "step-00000008", "step-00000012"]


def test_a_trial_reports_all_that_an_older_state_of_the_tuner_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    around, ours = Tune(monkeypatch, ends_at=16), experiment(tmp_path, max_steps=24)
    with pytest.raises(SystemExit):
        around.train(ours, {})
    assert [report["step"] for report in around.reports] == [4, 8, 12, 16]
    resumed = Tune(monkeypatch)
    resumed.give(Pointer(**around.pointers[1]), tmp_path / "own")  # type: ignore[arg-type]
    resumed.train(ours, {})
    for before, again in zip(around.reports[2:], resumed.reports, strict=False):
        assert before.items() <= again.items()
    assert resumed.pointers[:2] == around.pointers[2:]
    assert [report["step"] for report in resumed.reports] == [12, 16, 20, 24]
    assert [report["evaluations"] for report in resumed.reports] == [3, 4, 5, 6]


def test_a_trial_with_the_name_of_another_does_not_get_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    around, ours = Tune(monkeypatch), experiment(tmp_path)
    around.train(ours, {"config.learning_rate": 0.1})
    around.trial_id = "2"
    with pytest.raises(ConfigError, match=r"trial 2 has the name tiny_1, .*trial 1 with the values .*trial\.trial_id"):
        around.train(ours, {"config.learning_rate": 0.2})
    around.train(ours, {"config.learning_rate": 0.1})  # a trial that Ray Tune starts again may have another id
    assert around.reports[-1]["step"] == 12
    # Population-based training gives a trial other values.
    around.train(ours, {"config.learning_rate": 0.3})


class FailsInFirst(TinyTrainer):
    """Fails in the first trial."""

    def on_step_end(self) -> None:
        if self.global_step == 6 and str(self.run_dir).endswith("tiny_1"):
            raise ValueError("a bad batch")


def test_a_trial_that_replaces_a_failed_one_of_the_same_name_trains_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = CheckpointConfig(every=None, background=False)
    around, ours = Tune(monkeypatch), replace(experiment(tmp_path, checkpoint=checkpoint), trainer=FailsInFirst)
    with pytest.raises(ValueError, match="a bad batch"):
        around.train(ours, {"config.learning_rate": 0.1})
    assert [report["step"] for report in around.reports] == [4]
    # As `Tuner.restore(..., restart_errored=True)` with a trial_name_creator that uses the values alone.
    around.trial_id = "2"
    for _ in range(2):
        around.reports.clear()
        around.train(ours, {"config.learning_rate": 0.1})
        assert [report["step"] for report in around.reports] == [4, 8, 12]
    assert Run(f"{ours.run_dir}/tiny_1_2").record.resumed_from is None
    assert Run(f"{ours.run_dir}/tiny_1").status == "failed"


def test_a_repetition_has_another_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    around, ours = Tune(monkeypatch), experiment(tmp_path, seed=7)
    losses = []
    for index in (0, 1):
        around.name = around.trial_id = f"tiny_{index}"
        around.train(ours, {"config.learning_rate": 0.1, TRIAL_INDEX: index})
        assert Run(f"{ours.run_dir}/tiny_{index}").experiment().config.seed == 7 + index
        losses.append(around.reports[-1]["validation/loss"])
    assert losses[0] != losses[1]


def test_parameters_that_no_run_takes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"with_parameters\(trainable\(\.\.\.\), table=\.\.\.\) has no effect"):
        trainable(experiment(tmp_path))({}, table=[1, 2])


def test_a_trial_of_several_workers_whose_process_gets_their_cpus_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by `ResourceChangingScheduler`: its workers would wait forever for what the process reserves."""
    around, ours = Tune(monkeypatch), replace(experiment(tmp_path), scaling=Scaling(workers=2))
    result = {"metrics": {}, "last_checkpoint": None, "steps": 0}
    monkeypatch.setattr(theirs, "_drive", lambda *_: SimpleNamespace())
    monkeypatch.setattr(theirs, "asdict", lambda _: result)
    # The user may reserve something for the process itself.
    for bundle in ({"CPU": 1}, {"CPU": 1}, {"memory": 1}):
        around.resources = tune.PlacementGroupFactory([bundle])
        around.train(ours, {})
    around.resources = tune.PlacementGroupFactory([{"CPU": 4}])
    with pytest.raises(ConfigError, match=r"reserves {'CPU': 4.0} instead of {'CPU': 1.0}, .*trials of one worker"):
        around.train(ours, {})
    around.train(replace(ours, scaling=Scaling()), {})


def test_a_metric_that_no_evaluation_has_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="metric is 'validation/los', but an evaluation logs .*validation/loss"):
        Tune(monkeypatch).train(experiment(tmp_path), {}, "validation/los")


@pytest.mark.ray
def test_a_wrong_name_in_the_space_ends_the_tuner_before_a_trial_starts(tmp_path: Path, ray_session: None) -> None:
    ours = experiment(tmp_path)
    tuner = tune.Tuner(
        trainable(ours),
        param_space={"config.learning_rat": tune.uniform(0.1, 0.2), TRIAL_INDEX: 1},
        run_config=tune.RunConfig(
            storage_path=str(tmp_path / "ray"), verbose=0, failure_config=tune.FailureConfig(max_failures=-1)
        ),
    )
    with pytest.raises(ConfigError, match=r"config\.learning_rat: .*; did you mean config\.learning_rate\?"):
        tuner.fit()
    assert not Path(ours.run_dir).exists()


@pytest.mark.ray
def test_tuners_of_ray_search_prune_and_are_restored(tmp_path: Path, ray_session: None) -> None:
    ours = experiment(tmp_path)
    tuner = tune.Tuner(
        trainable(ours, metric="validation/loss"),
        param_space={"config.learning_rate": tune.loguniform(1e-4, 1e-1)},
        tune_config=tune.TuneConfig(
            metric="validation/loss", mode="min", num_samples=4, max_concurrent_trials=2,
            search_alg=OptunaSearch(seed=1), scheduler=ASHAScheduler(grace_period=1, max_t=3, reduction_factor=2),
        ),
        run_config=tune.RunConfig(name="theirs", storage_path=str(tmp_path / "ray"), verbose=0),
    )  # fmt: skip
    results = tuner.fit()
    assert len(results) == 4
    assert results.num_errors == 0
    best = results.get_best_result()
    assert best.metrics is not None
    assert best.checkpoint is not None
    path = checkpoint_path(best.checkpoint)
    run = Run(str(Path(path).parents[1]))
    assert run.experiment().config.learning_rate == best.config["config.learning_rate"]
    assert best.metrics["step"] == 12
    assert run.record.metrics["validation/loss"] == best.metrics["validation/loss"]
    restored = tune.Tuner.restore(
        str(tmp_path / "ray" / "theirs"), trainable(ours, metric="validation/loss"), resume_unfinished=True
    )
    assert len(restored.get_results()) == 4
