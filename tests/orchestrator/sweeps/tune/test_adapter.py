"""The sweep driver between Ray Tune and the files of the trials. Without a running Ray."""

from __future__ import annotations

import io
import json
import math
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from ray.tune.schedulers import FIFOScheduler, HyperBandScheduler, PopulationBasedTraining
from ray.tune.search import Searcher, SearchGenerator
from rich.console import Console

from headway.orchestrator import ASHA, PBT, HyperBand, LogUniform, MedianStopping, Search, StorageError
from headway.orchestrator.runs.open import open_sweep
from headway.orchestrator.runs.requests import StopRequest, read_stop_request, request_stop
from headway.orchestrator.runs.run import Run
from headway.orchestrator.storage.events import EventWriter, read_events
from headway.orchestrator.storage.folder import Folder
from headway.orchestrator.sweeps.console import SweepConsole
from headway.orchestrator.sweeps.driver import SweepDriver
from headway.orchestrator.sweeps.record import Sweep
from headway.orchestrator.sweeps.schedulers import Scheduler
from headway.orchestrator.sweeps.tune import ray_schedulers as tune_schedulers
from headway.orchestrator.sweeps.tune.ray_schedulers import GracefulStopScheduler, reports_of_ended_trials
from headway.orchestrator.train.signals import StopSignals
from headway.trainer.errors import ConfigError
from tests.orchestrator.runs.test_run import experiment
from tests.orchestrator.runs.test_stop import Leaving

SPACE = {"config.learning_rate": LogUniform(1e-4, 1e-1)}
SPACE_OF_PBT = {"config.learning_rate": [1e-3, 1e-2]}


def gentle(sweep: Sweep, search: Search) -> tuple[GracefulStopScheduler, Any]:
    driver: Any = SimpleNamespace(
        search=search,
        sweep=sweep,
        max_concurrent=1,
        exploited=lambda *_: pytest.fail("no PBT"),
        reach_goal=lambda _: pytest.fail("no stopper"),
    )
    return GracefulStopScheduler(driver), SimpleNamespace()


@pytest.mark.parametrize(
    "wanted",
    [
        ASHA(grace=1, reduction=2, max_evaluations=4),
        HyperBand(grace=1, reduction=2, max_evaluations=4, brackets=1),
        MedianStopping(grace=1, trials=3),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_trial_is_judged_by_those_that_have_ended_under_an_earlier_driver(tmp_path: Path, wanted: Scheduler) -> None:
    search = Search(space=SPACE, trials=9, scheduler=wanted)
    sweep = open_sweep(experiment(tmp_path), search)
    for index, losses in enumerate(([0.1, 0.1], [0.2, math.nan], [0.3, 0.3], [0.4, 0.4], [])):
        name = f"trial-00{index}"
        Folder(sweep.folder.path(name)).prepare()
        log = EventWriter(Folder(sweep.folder.path(name)), "rank-0")
        for step, loss in enumerate(losses):
            log.add("evaluated", step=step, metrics={"validation/loss": loss})
        sweep.note("trial_suggested", trial=name, index=index, values={})
        sweep.note("trial_ended", trial=name, status="completed")
    earlier = reports_of_ended_trials(sweep, search)
    assert [len(each) for each in earlier.values()] == [2, 2, 2, 2, 0]
    new = open_sweep(replace(experiment(tmp_path), name="new"), search)
    for index, (of, loss, is_stopped) in enumerate(((sweep, 9.0, True), (sweep, 0.01, False), (new, 9.0, False))):
        scheduler, controller = gentle(of, search)
        name = f"trial-00{index + 5}"
        Folder(of.folder.path(name)).prepare()
        silent: Any = tune_schedulers.replayed_trial("trial-008")
        scheduler.on_trial_add(controller, silent)
        # It failed before its first report.
        scheduler.on_trial_complete(controller, silent, {"done": True})
        trial: Any = tune_schedulers.replayed_trial(name)
        scheduler.on_trial_add(controller, trial)
        report = {"validation/loss": loss, "evaluations": 1, "step": 1}
        assert scheduler.on_trial_result(controller, trial, report) == "CONTINUE"
        stop = read_stop_request(Folder(of.folder.path(name)))
        reason = f"pruned by {type(wanted).__name__} after 1 evaluation"
        assert (stop.reason if stop else None) == (reason if is_stopped else None)


def test_with_a_metric_of_the_training_a_trial_is_stopped_after_as_many_records(tmp_path: Path) -> None:
    search = Search(space=SPACE, metric="train/loss", trials=9, scheduler=ASHA(grace=3, max_evaluations=9))
    sweep = open_sweep(experiment(tmp_path), search)
    Folder(sweep.folder.path("trial-000")).prepare()
    lines = [json.dumps({"step": step, "train/loss": 0.1}) for step in (1, 2, 3)]
    Path(sweep.folder.path("trial-000"), "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    sweep.note("trial_ended", trial="trial-000", status="completed")
    scheduler, controller = gentle(sweep, search)
    Folder(sweep.folder.path("trial-001")).prepare()
    trial: Any = tune_schedulers.replayed_trial("trial-001")
    scheduler.on_trial_add(controller, trial)
    for number in (1, 2, 3):
        scheduler.on_trial_result(controller, trial, {"train/loss": 9.0, "evaluations": number, "step": number})
    stop = read_stop_request(Folder(sweep.folder.path("trial-001")))
    assert stop is not None
    assert stop.reason == "pruned by ASHA after 3 records"


def test_pbt_runs_beside_a_searcher_and_trials_train_without_it_if_a_later_ray_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ControllerWithoutSearch` hides what PBT looks at: if this fails, it looks at something else."""
    search = Search(space=SPACE, trials=2, scheduler=PBT())
    theirs = SimpleNamespace(search_alg=SearchGenerator(Searcher()))
    trial: Any = tune_schedulers.replayed_trial("trial-000")
    with pytest.raises(ValueError, match="Search algorithms cannot be used"):
        tune_schedulers.make_schedulers(search)[0].on_trial_add(theirs, trial)
    scheduler, _ = gentle(open_sweep(experiment(tmp_path), search), search)
    scheduler.on_trial_add(theirs, trial)
    assert "PopulationBasedTraining" in scheduler.debug_string()

    monkeypatch.setattr(tune_schedulers, "ControllerWithoutSearch", lambda controller: controller)
    scheduler, controller = gentle(open_sweep(replace(experiment(tmp_path), name="later"), search), search)
    scheduler.on_trial_add(theirs, trial)
    report = {"validation/loss": 1.0, "evaluations": 1, "training_iteration": 1, "step": 1}
    assert scheduler.on_trial_result(controller, trial, report) == "CONTINUE"
    assert "FIFO" in scheduler.debug_string()


def test_a_trial_waits_for_the_others_if_pbt_is_synchronous(tmp_path: Path) -> None:
    """Ray's asynchronous PBT pauses to make room for trials that wait, but a sweep has room for all that it starts."""
    for synch, decision in ((True, "PAUSE"), (False, "CONTINUE")):
        pbt = PopulationBasedTraining(
            time_attr="evaluations", perturbation_interval=1, synch=synch, hyperparam_mutations=SPACE_OF_PBT
        )
        search = Search(space=SPACE, trials=2, scheduler=pbt)
        scheduler, _ = gentle(open_sweep(replace(experiment(tmp_path), name=f"pbt-{synch}"), search), search)
        scheduler._driver.max_concurrent = 2  # type: ignore[misc]
        trials = [tune_schedulers.replayed_trial(f"trial-00{index}") for index in range(2)]
        trials[0].set_status("PENDING")
        controller: Any = SimpleNamespace(search_alg=None, get_live_trials=lambda t=trials: t)
        controller.get_trials = controller.get_live_trials
        for trial in trials:
            scheduler.on_trial_add(controller, trial)
        trials[1].set_status("RUNNING")
        report = {"validation/loss": 1.0, "evaluations": 1, "step": 1}
        assert scheduler.on_trial_result(controller, trials[1], report) == decision


def test_the_change_of_another_trial_than_the_reporting_one_is_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Synchronous PBT changes all trials at the last report."""

    class ChangesOther(FIFOScheduler):  # type: ignore[misc]
        def on_trial_result(self, controller: Any, trial: Any, result: Any) -> str:
            waiting.set_config({**trial.config, "config.learning_rate": 0.5})
            return "CONTINUE"

    search = Search(space=SPACE, trials=2, scheduler=ChangesOther())
    scheduler, controller = gentle(open_sweep(experiment(tmp_path), search), search)
    applied: list[Any] = []
    monkeypatch.setattr(scheduler, "_apply_exploit", lambda *args: applied.append(args))
    waiting, reporting = (tune_schedulers.replayed_trial(f"trial-00{index}") for index in range(2))
    scheduler.on_trial_add(controller, waiting)
    scheduler.on_trial_add(controller, reporting)
    scheduler.on_trial_result(controller, reporting, {"validation/loss": 1.0, "evaluations": 1, "step": 1})
    assert applied == [(waiting, {"trial": "trial-000"})]


def test_a_trial_that_a_scheduler_forgets_while_it_is_paused_ends(tmp_path: Path) -> None:
    """Ray's `HyperBandScheduler` does so with a trial that is still saving when its bracket ends."""
    search = Search(space=SPACE, trials=2, scheduler=HyperBandScheduler(time_attr="evaluations", max_t=4))
    sweep = open_sweep(experiment(tmp_path), search)
    scheduler, _ = gentle(sweep, search)
    ended: list[str] = []
    controller: Any = SimpleNamespace(stop_trial=lambda trial: ended.append(trial.trial_id))
    forgotten, last = (tune_schedulers.replayed_trial(f"trial-00{index}") for index in range(2))
    for trial, status in ((forgotten, "PAUSED"), (last, "RUNNING")):
        scheduler.on_trial_add(controller, trial)
        trial.set_status(status)
    scheduler.has_all_trials = True
    assert scheduler.choose_trial_to_run(controller) is None
    assert not ended, "the last one still trains"
    last.set_status("TERMINATED")
    scheduler.has_all_trials = False
    assert scheduler.choose_trial_to_run(controller) is None
    assert not ended, "there may be other trials"
    scheduler.has_all_trials = True
    assert scheduler.choose_trial_to_run(controller) is None
    assert ended == ["trial-000"]
    request_stop(sweep.folder, StopRequest(reason="stopped"))
    scheduler.choose_trial_to_run(controller)
    assert ended == ["trial-000"], "it resumes with the sweep"


def lead(search: Search, folder: str) -> SweepDriver:
    asked = replace(experiment(Path("runs")), name="sweep", storage=folder)
    display = SweepConsole("validation/loss", "min", Console(file=io.StringIO()))
    return SweepDriver(asked, search, open_sweep(asked, search), StopSignals(), display)


def test_a_storage_that_is_away_for_a_moment_does_not_end_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("leaving", Leaving)
    leader = lead(Search(space=SPACE, trials=2), "leaving://away")
    sweep = leader.sweep
    given: list[str] = []

    def tune_trials(driver: SweepDriver) -> None:
        while True:
            Leaving.is_away = True
            threading.Timer(0.5, setattr, (Leaving, "is_away", False)).start()
            if not isinstance(found := driver.next_trial(), tuple):
                break
            given.append(found[0].name)
            Run(found[0].run_dir).update(status="completed")
            Leaving.is_away = True
            threading.Timer(0.5, setattr, (Leaving, "is_away", False)).start()
            driver.ended(found[0].name, None)

    monkeypatch.setattr(Leaving, "is_away", False)
    # Each iteration of the driver must write.
    monkeypatch.setattr("headway.orchestrator.runs.run.HEARTBEAT_S", 0.0)
    capacity: Any = SimpleNamespace(summary="", max_concurrent=1, poll=lambda: None)
    assert leader.run(capacity, tune_trials, leave_s=0.0) == ("completed", "all trials have ended")
    assert given == ["trial-000", "trial-001"]
    Leaving.is_away = False
    journal = [(each["event"], each["trial"]) for each in read_events(sweep.folder)]
    # In this order, each once: a failed write was repeated.
    assert journal == [(kind, name) for name in given for kind in ("trial_suggested", "trial_ended")]


@pytest.mark.parametrize("error", [ConfigError, RuntimeError])
def test_a_driver_that_leaves_by_an_error_lets_no_trial_begin(tmp_path: Path, error: type[Exception]) -> None:
    leader = lead(Search(space=SPACE, trials=2), str(tmp_path))
    seen: list[bool] = []

    def tune_trials(driver: SweepDriver) -> None:
        assert driver.max_concurrent == 1
        driver.next_trial()
        deadline_s = time.monotonic() + 120
        while not driver.is_over and time.monotonic() < deadline_s:
            time.sleep(0.01)
        seen.append(driver.is_over)

    def look() -> None:
        raise error("a trial has not come up")

    capacity: Any = SimpleNamespace(summary="", max_concurrent=1, poll=look)
    with pytest.raises(error, match="a trial has not come up"):
        leader.run(capacity, tune_trials, leave_s=10.0)
    assert seen == [True]
    leader.sweep.update(status="failed")
    # Not a failure of the trial, which the next driver resumes.
    assert [(trial.status, trial.has_ended) for trial in leader.sweep.trials()] == [("interrupted", False)]


def test_a_driver_of_a_sweep_loses_no_wish_to_a_storage_that_is_away_and_gives_up_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fsspec.register_implementation("leaving", Leaving)
    leader = lead(Search(space=SPACE, trials=2), "leaving://wish")
    monkeypatch.setattr("headway.orchestrator.runs.run.HEARTBEAT_S", 0.0)
    monkeypatch.setattr(Leaving, "is_away", True)
    leader._signals.count = 1
    assert leader._poll() is None
    Leaving.is_away = False
    assert leader._poll() is None
    stop = read_stop_request(leader.sweep.folder)
    assert stop is not None
    assert stop.status == "interrupted"
    assert leader._stop == stop
    Leaving.is_away = True
    assert leader._poll() is None
    leader._outage._since_s -= 61
    with pytest.raises(StorageError, match="the store is away"):
        leader._poll()
