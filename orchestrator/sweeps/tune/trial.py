"""Runs one trial in its process: the driver of its run and, for a single worker, also the training.

The workers of a larger trial are started by Ray Train. Only evaluations are reported to Ray Tune.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ray import tune
from rich.console import Console

from headway.trainer.callbacks.base import Callback
from headway.trainer.checkpoints.retention import Best, Mode

from ...config.experiment import Experiment
from ...config.scaling import Scaling
from ...config.values import with_values
from ...display.console import RunConsole
from ...errors import RunConflictError
from ...runs.metric_history import metric_by_step
from ...runs.ownership import own_folder
from ...runs.requests import read_stop_request
from ...runs.result import RunResult
from ...runs.resume import ResumeOptions
from ...runs.run import Driver, Run, now
from ...storage.events import read_events
from ...storage.folder import Folder, retry_storage
from ...train.driver import RunDriver
from ...train.fit import close, record_failure
from ...train.ray_train_thread import last_pointer
from ...train.signals import StopSignals
from ...train.train_loop import Start
from ...train.worker import run_attempt
from ...train.worker_group import make_task, retry_policy, run_worker_group, wait_to_restart
from ..record import ENDED_EARLY, PRUNED
from .reporting import EventReporter, TuneReporter, check_metric

# For the workers of a trial to save and to end.
_END_S = 60


@dataclass(frozen=True, kw_only=True)
class SweepTask:
    """The settings that the sweep's driver passes to all trials.

    Attributes:
        start: the experiment without the values of a trial, and what the trials import.
        sweep_dir: folder of the sweep.
        metric, mode: the objective.
        pauses: whether the scheduler needs a checkpoint of each evaluation, and may change the values of a trial.
        objectives, constraints: names of further metrics that a complete trial must have.
    """

    start: Start
    sweep_dir: str
    metric: str
    mode: Mode
    pauses: bool
    objectives: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()


def run_trial(config: dict[str, Any], task: SweepTask) -> None:
    """Train one trial until it ends, and record the end in its run. Raises no error of the training."""
    # Time for a paused trial to write its checkpoint.
    os.environ["TUNE_FUNCTION_THREAD_TIMEOUT_S"] = "60"
    name = tune.get_context().get_trial_name()
    run = Run(Folder(task.sweep_dir).path(name))
    if read_stop_request(Folder(task.sweep_dir)) is not None:
        return
    values = {path: value for path, value in config.items() if path not in ("trial", "resume")}
    experiment = replace(task.start.enter(values), name=name, storage=task.sweep_dir)
    # From the sweep's driver, or from an earlier process of this trial that may be on a lost machine.
    with own_folder(run.folder, take_over=True) as ownership:
        run.update(
            status="running", reason="", error=None, started=now(), ended=None, driver=Driver.this(),
            claim=ownership.id,
        )  # fmt: skip
        _train_trial(run, experiment, _resume_from(run, config["resume"]), task)


def _train_trial(run: Run, experiment: Experiment, resume: str, task: SweepTask) -> None:
    """Train a trial that this process owns."""
    trains_here = experiment.scaling.trains_in_trial
    reporter = TuneReporter(run.run_dir, task.metric, saves=task.pauses, is_adopted=resume != "auto", mode=task.mode)
    display = RunConsole(Console(quiet=True)) if trains_here else EventReporter(reporter)
    callbacks = reporter.callbacks(trains_here=trains_here)
    try:
        result = drive(experiment, run, display, callbacks, ResumeOptions(resume=resume, accept_changes=task.pauses))
        if result.status == "completed" or result.reason.startswith(ENDED_EARLY):
            result = replace(result, metrics=_judged_metrics(run, result.metrics, task))
    except RunConflictError:
        # The trial's files belong to another process now.
        return
    except Exception as error:
        record_failure(run, error)
        return
    if task.pauses:
        # A checkpoint of another trial contains that trial's best value.
        best = retry_storage(lambda: _best_of_own_evaluations(run, task))
        result = replace(result, best_metric=best.value, best_step=best.step)
    asked = read_stop_request(run.folder)
    if result.status == "interrupted" and asked is not None and asked.reason.startswith(PRUNED):
        # The scheduler has ended it while it was being paused.
        result = replace(result, status=asked.status, reason=asked.reason)
    close(run, result, display)
    if reporter.has_ended:
        # Ray Tune expects a paused trial's function to end this way.
        sys.exit(0)


def _judged_metrics(run: Run, metrics: dict[str, float], task: SweepTask) -> dict[str, float]:
    """Return the last metrics of a complete trial, among them all by which it is judged.

    Raises:
        ConfigError: the run has not logged one of these.
    """
    named = {"metric is": (task.metric,), "objectives name": task.objectives, "constraints name": task.constraints}
    for named_by, names in named.items():
        for name in names:
            # A run that died after its last checkpoint has resumed without the records after it.
            if name not in metrics and (logged := retry_storage(partial(metric_by_step, run.folder, name))):
                metrics = {**metrics, name: list(logged.values())[-1]}
            check_metric(name, metrics, "a trial", named_by)
    return metrics


def drive(
    experiment: Experiment, run: Run, display: RunConsole, callbacks: Sequence[Callback], resume_options: ResumeOptions
) -> RunResult:
    """Drive the run of a trial to its end, as `fit` does. Raises whatever the trainer raises."""
    if not experiment.scaling.trains_in_trial:
        _wait_for_the_end()
    return RunDriver(
        experiment, run, StopSignals(), display, verbose=False, spares=False, callbacks=callbacks,
        train=_train_here if experiment.scaling.trains_in_trial else run_worker_group, resume_options=resume_options,
        # A trial may have to wait for others to end. In a sweep, its driver enforces the wait.
        enforce_wait=False,
    ).run()  # fmt: skip


def _wait_for_the_end() -> None:
    """Let Ray Tune end this process only when the run has ended, for at most `_END_S`.

    Ray Tune ends the process of a trial that it pauses without waiting for its function, and with it Ray Train's
    controller. The placement group of the workers would then stay until Ray Train's cleaner finds that out, which it
    never does in a Ray without dashboard.
    """
    with suppress(ImportError, AttributeError):
        from ray.train._internal.session import get_session

        session = get_session()
        finish = session.finish
        session.finish = lambda timeout=None: finish(timeout=timeout or _END_S)


def _best_of_own_evaluations(run: Run, task: SweepTask) -> Best:
    """Return the best value of a run's own evaluations."""
    best = Best(task.mode)
    for event in read_events(run.folder):
        # Evaluations after the same step may be of different weights, if the trial resumed from an earlier checkpoint.
        if event["event"] == "evaluated" and task.metric in event["metrics"]:
            best.update(event["metrics"][task.metric], step=event["step"])
    return best


def _train_here(
    experiment: Experiment,
    run: Run,
    *,
    callbacks: Sequence[Callback],
    resume_options: ResumeOptions,
    verbose: bool,
    **_: Any,
) -> dict[str, Any]:
    """Train in this process, with the retries of the experiment. If the process dies, Ray Tune restarts it."""
    task = make_task(experiment, run, resume_options=resume_options, verbose=verbose, callbacks=callbacks)
    # Notices come from Ray Train, which does not run here.
    task = replace(task, polls_preemption=False)
    watch = retry_policy(experiment, run)
    while True:
        try:
            return run_attempt(task, lambda: (experiment.trainer, experiment.config))
        except Exception as error:
            wait_to_restart(run.folder, watch.decide({0: error}).delay_s)


def _resume_from(run: Run, resume: str) -> str:
    """Return "auto" once this trial has saved a checkpoint; before, what the driver chose."""
    last = last_pointer(tune)
    return "auto" if last is not None and last.run_dir == run.run_dir else resume


def trial_resources(scaling: Scaling, values: Mapping[str, Any]) -> Any:
    """Return the resources of a trial's process: its worker's, or almost none beside workers of Ray Train.

    Args:
        scaling: the resources of the experiment.
        values: settings of the trial by path, some of which may be below `scaling`.
    """
    changes = {path.removeprefix("scaling."): each for path, each in values.items() if path.startswith("scaling.")}
    scaling = with_values(scaling, changes)
    if not scaling.trains_in_trial:
        # Ray Tune rejects an empty reservation, and any fraction of a CPU would be missing for the workers.
        return tune.PlacementGroupFactory([{"memory": 1}])
    labels = {"bundle_label_selector": [scaling.label_selector]} if scaling.label_selector else {}
    return tune.PlacementGroupFactory([scaling.worker_resources], **labels)
