"""A trial in its process, and its errors when it lacks the metric. Without Ray."""

from __future__ import annotations

import io
import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import tune
from ray.train._internal import session as rays_session
from rich.console import Console

from headway.orchestrator import ASHA, Experiment, LogUniform, Scaling, Search
from headway.orchestrator.runs.open import open_run, open_sweep
from headway.orchestrator.runs.ownership import own_folder
from headway.orchestrator.runs.requests import read_stop_request
from headway.orchestrator.runs.resume import ResumeOptions
from headway.orchestrator.runs.run import Run
from headway.orchestrator.storage.events import EventWriter, read_events
from headway.orchestrator.sweeps.console import SweepConsole
from headway.orchestrator.sweeps.record import TrialResult
from headway.orchestrator.sweeps.tune import trial
from headway.orchestrator.sweeps.tune.ray_schedulers import reports_of_ended_trials
from headway.orchestrator.sweeps.tune.reporting import EventReporter, ReportEvaluations, TuneReporter, make_report
from headway.orchestrator.sweeps.tune.trial import SweepTask, run_trial
from headway.orchestrator.train import driver
from headway.orchestrator.train.train_loop import Start
from headway.trainer import CheckpointConfig, Duration
from headway.trainer.errors import ConfigError
from tests.orchestrator.runs.test_run import experiment
from tests.tiny import TinyConfig, TinyTrainer


def task_of_a_sweep(storage: Path, found: Experiment, **changes: Any) -> SweepTask:
    return SweepTask(**{
        "start": Start.of(found, ResumeOptions()), "sweep_dir": str(storage), "metric": "validation/loss",
        "mode": "min", "pauses": False, **changes,
    })  # fmt: skip


def reporter_of(task: SweepTask, run: Run) -> TuneReporter:
    return TuneReporter(run.run_dir, task.metric, saves=task.pauses, mode=task.mode)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The reports of the trial `tiny` to Ray Tune."""
    reports: list[dict[str, Any]] = []
    monkeypatch.setattr(tune, "get_context", lambda: SimpleNamespace(get_trial_name=lambda: "tiny"))
    monkeypatch.setattr(tune, "get_checkpoint", lambda: None)
    monkeypatch.setattr(tune, "report", lambda report, checkpoint=None: reports.append(report))
    monkeypatch.setattr(driver, "placed_groups", set)
    return reports


def test_a_trial_that_goes_on_from_another_one_is_not_as_good_as_that_one_was(
    tmp_path: Path, told: list[dict[str, Any]]
) -> None:
    donor = TinyTrainer(TinyConfig(max_epochs=1), run_dir=str(tmp_path / "donor")).fit()
    assert donor.best_metric is not None
    # As set by the sweep: each evaluation is reported with its checkpoint.
    found = experiment(tmp_path, max_steps=None, max_epochs=3, checkpoint=CheckpointConfig(background=False))
    open_run(found)
    bad = {"config.learning_rate": 5.0, "trial": "tiny", "resume": donor.last_checkpoint}
    run_trial(bad, task_of_a_sweep(tmp_path, found, pauses=True))
    record = Run(found.run_dir).record
    assert (record.status, record.steps, len(told)) == ("completed", 36, 2)
    own = {report["step"]: report["validation/loss"] for report in told}
    assert min(own.values()) > 10 * donor.best_metric, "or the test shows nothing"
    assert (record.best_metric, record.best_step) == (min(own.values()), min(own, key=own.__getitem__))
    assert str(record.best_checkpoint).endswith(f"step-{record.best_step:08d}")


def test_evaluations_of_a_trial_of_several_workers_are_counted_on_when_it_is_started_again(
    tmp_path: Path, told: list[dict[str, Any]]
) -> None:
    found = experiment(tmp_path)
    run = open_run(found).run
    log = EventWriter(run.folder, "rank-0")
    # The second start resumes from the checkpoint of step 25, and repeats one evaluation.
    for steps in ((10, 20, 30), (30, 40, 50)):
        relay = EventReporter(reporter_of(task_of_a_sweep(tmp_path, found), run))
        for step in steps:
            log.add("evaluated", step=step, metrics={"validation/loss": 1.0}, evaluations=step // 10)
            relay.event(read_events(run.folder)[-1])
    assert [(each["step"], each["evaluations"]) for each in told] == [
        (10, 1), (20, 2), (30, 3), (30, 3), (40, 4), (50, 5),
    ]  # fmt: skip


def test_a_process_that_ray_tune_has_replaced_does_not_stop_its_successor(
    tmp_path: Path, told: list[dict[str, Any]]
) -> None:
    found = experiment(tmp_path)
    run = open_run(found, take_over=True).run
    reporter = reporter_of(task_of_a_sweep(tmp_path, found), run)
    relay = EventReporter(reporter)
    reporter.has_ended = True
    relay.event({"event": "heartbeat"})
    assert (asked := read_stop_request(run.folder)) is not None
    assert asked.reason == "ended or paused by Ray Tune"
    with own_folder(run.folder, take_over=True) as successor:
        run.update(claim=successor.id)
        relay.event({"event": "heartbeat"})
        assert read_stop_request(run.folder) is None


def test_with_a_metric_of_the_training_its_records_are_counted_and_found_again(
    tmp_path: Path, told: list[dict[str, Any]]
) -> None:
    """Not steps: otherwise the first record would already be past the rungs at 1 and 4."""
    base = replace(experiment(tmp_path, max_steps=None, max_epochs=2, log_every="4 steps"), name="sweep")
    space = {"config.learning_rate": LogUniform(1e-3, 1e-1)}
    asked = Search(space=space, metric="train/loss", trials=1, scheduler=ASHA())
    sweep = open_sweep(base, asked)
    found = asked.trial(base, "tiny", {})
    task = task_of_a_sweep(Path(sweep.sweep_dir), found, metric="train/loss")
    for epochs in (1, 2):
        lasting = replace(found, config=replace(found.config, max_epochs=epochs))
        run = open_run(lasting).run
        run_trial({"trial": "tiny", "resume": "auto"}, replace(task, start=Start.of(lasting, ResumeOptions())))
        assert Run(run.run_dir).status == "completed"
    assert [(each["step"], each["evaluations"]) for each in told] == [
        (4, 1),
        (8, 2),
        (12, 3),
        (16, 4),
        (20, 5),
        (24, 6),
    ]
    sweep.note("trial_ended", trial="tiny", status="completed")
    assert reports_of_ended_trials(sweep, asked) == {"tiny": told}


def test_an_evaluation_that_measured_nothing_finite_is_shown_so(tmp_path: Path) -> None:
    screen = io.StringIO()
    display = SweepConsole("validation/loss", "max", Console(file=screen, force_terminal=True, width=120))
    report = make_report("validation/loss", "max", math.nan, 1, 10)
    assert math.isfinite(report["validation/loss"]), "schedulers stop nothing of which they know no worth"
    display.started(TrialResult(name="trial-000", index=0, values={}))
    display.reported("trial-000", report)
    Console(file=screen).print(display._table())
    assert "nan" in screen.getvalue()
    assert "1e+30" not in screen.getvalue()


def test_workers_of_a_trial_wait_for_others_to_end_as_long_as_it_takes(
    tmp_path: Path, told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever `wait` is: a trial that had no resources has not failed."""
    returned = {"status": "interrupted", "reason": "told to stop before it began"}

    def wait_for_a_place(*_: Any, **__: Any) -> dict[str, str]:
        time.sleep(1.0)
        return returned

    monkeypatch.setattr(trial, "run_worker_group", wait_for_a_place)
    monkeypatch.setattr("headway.orchestrator.cluster.connect.missing_resources", lambda _: "")
    found = replace(experiment(tmp_path), scaling=Scaling(workers=2, wait=Duration(0.1, "seconds")))
    run = open_run(found).run
    run_trial({"trial": "tiny", "resume": "auto"}, task_of_a_sweep(tmp_path, found))
    assert (Run(run.run_dir).status, Run(run.run_dir).reason) == tuple(returned.values())


@pytest.mark.parametrize("metric", ["train/los", "validation/los"])
def test_a_trial_that_never_gives_the_metric_of_the_sweep_fails(
    tmp_path: Path, told: list[dict[str, Any]], metric: str
) -> None:
    found = experiment(tmp_path)
    open_run(found)
    task = task_of_a_sweep(tmp_path, found, metric=metric)
    run_trial({"trial": found.name, "resume": "auto"}, task)
    assert told == []
    run = Run(found.run_dir)
    assert run.status == "failed"
    assert f"metric is '{metric}', but " in (run.record.error or "")
    assert f"{metric}s" in (run.record.error or ""), "what there is instead"
    assert [read_events(run.folder)[-1][name] for name in ("event", "status")] == ["driver_ended", "failed"]

    # Separate workers report evaluations by their events.
    if metric.startswith("validation/"):
        with pytest.raises(ConfigError, match="metric is 'validation/los', but an evaluation logs validation/loss"):
            EventReporter(reporter_of(task, run)).event(
                {"event": "evaluated", "step": 1, "metrics": {"validation/loss": 1.0}, "evaluations": 1}
            )


@pytest.mark.parametrize(("field", "wrong"), [("objectives", "latency"), ("constraints", "train/los")])
def test_a_trial_that_ends_without_the_metric_of_an_objective_or_a_constraint_fails(
    tmp_path: Path, told: list[dict[str, Any]], field: str, wrong: str
) -> None:
    found = experiment(tmp_path)
    open_run(found)
    base = task_of_a_sweep(tmp_path, found)
    run_trial({"trial": found.name, "resume": "auto"}, replace(base, **{field: ("train/loss", wrong)}))
    run = Run(found.run_dir)
    assert run.status == "failed"
    assert f"{field} name '{wrong}', but a trial logs " in (run.record.error or "")
    assert "train/loss" in (run.record.error or "")
    # Corrected, the trial has nothing more to train, and the checkpoint was saved before the last record.
    run_trial({"trial": found.name, "resume": "auto"}, replace(base, **{field: ("train/loss",)}))
    assert Run(found.run_dir).status == "completed"
    assert "train/loss" in Run(found.run_dir).record.metrics


def test_an_evaluation_that_comes_while_the_one_before_is_saved_has_its_own_checkpoint(
    tmp_path: Path, told: list[dict[str, Any]]
) -> None:
    """Saving is slower than training here; each evaluation is reported, never with an earlier checkpoint."""
    found = replace(experiment(tmp_path, max_steps=None, max_epochs=3), name="tiny")
    open_run(found)
    task = task_of_a_sweep(tmp_path, found, pauses=True)
    reporter = ReportEvaluations(reporter_of(task, Run(found.run_dir)))
    trainer: Any = SimpleNamespace(global_step=10, progress=SimpleNamespace(evaluations=0))
    reporter.on_evaluation_end(trainer, {"validation/loss": 3.0})
    trainer.global_step, trainer.progress.evaluations = 20, 1
    reporter.on_evaluation_end(trainer, {"validation/loss": 2.0})
    for step, expected in ((10, [(10, 1, 3.0)]), (20, [(10, 1, 3.0), (20, 2, 2.0)])):
        reporter.on_checkpoint_saved(trainer, SimpleNamespace(step=step, path=tmp_path / f"step-{step}"))
        assert [(each["step"], each["evaluations"], each["validation/loss"]) for each in told] == expected


def test_a_process_of_trials_never_collects_what_it_has_imported() -> None:
    script = (
        "import gc, sys\n"
        "from headway.orchestrator.sweeps.tune import trial_process\n"
        "assert 'torch' not in sys.modules\n"
        "gc.collect()\n"
        "rounds = [each['collections'] for each in gc.get_stats()]\n"
        "trial_process._import_all(True)\n"
        "assert [each['collections'] for each in gc.get_stats()] == rounds\n"
        "assert gc.isenabled() and gc.get_freeze_count() > 100_000 > len(gc.get_objects())\n"
        "assert {'headway.orchestrator.sweeps.tune.trial', 'torch._dynamo'} <= sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_ray_tune_waits_for_the_workers_of_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray Tune asks its session to finish without waiting; without the private session, nothing changes."""
    waited: list[float | None] = []
    session = SimpleNamespace(finish=lambda timeout=None: waited.append(timeout))
    monkeypatch.setattr(rays_session, "get_session", lambda: session)
    trial._wait_for_the_end()
    session.finish(timeout=0)
    session.finish(timeout=5)
    assert waited == [60, 5]
    monkeypatch.setattr(rays_session, "get_session", lambda: None)
    trial._wait_for_the_end()
    monkeypatch.delattr(rays_session, "get_session")
    trial._wait_for_the_end()
