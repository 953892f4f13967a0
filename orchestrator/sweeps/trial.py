"""Runs one trial in its process: the driver of its run and, for a single worker, also the training.

The workers of a larger trial are started by Ray Train. Only evaluations are reported to Ray Tune.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray.cloudpickle
from ray import tune
from rich.console import Console

from headway.trainer.callbacks.base import Callback
from headway.trainer.checkpoints.retention import Best, Mode
from headway.trainer.errors import ConfigError
from headway.trainer.trainer import Trainer

from ..cli.console import RunConsole
from ..config.experiment import Experiment, Scaling
from ..errors import RunConflictError
from ..runs.metric_history import metric_by_step
from ..runs.ownership import own_folder
from ..runs.requests import read_stop_request
from ..runs.resume import ResumeOptions
from ..runs.run import Driver, Run, now
from ..storage.events import Event, read_events
from ..storage.folder import Folder, retry_storage
from ..train.driver import RunDriver
from ..train.fit import close, summarize_error, write_driver_ended
from ..train.signals import StopSignals
from ..train.worker import run_attempt
from ..train.worker_group import make_task, retry_policy, run_worker_group, wait_to_restart

if TYPE_CHECKING:
    from .search import Search

# Reported to the scheduler for an evaluation without a finite value.
_WORST = 1e30
_POINTER = "headway.json"
PAUSED = "paused by the scheduler"


@dataclass(frozen=True, kw_only=True)
class SweepTask:
    """The settings that the sweep's driver passes to all trials.

    Attributes:
        experiment: pickled, without the values of a trial; classes from a user's file are pickled by value.
        sweep_dir: folder of the sweep.
        metric, mode: the objective.
        pauses: whether the scheduler needs a checkpoint of each evaluation.
        may_change: whether the values of a trial may change while it trains.
        trains_here: whether most trials train in the process that Ray Tune starts, which then imports what they need.
        imports: folders that the driver imports from, besides its installed packages.
        current_dir: the driver's current directory.
    """

    experiment: bytes
    sweep_dir: str
    metric: str
    mode: Mode
    pauses: bool
    may_change: bool
    trains_here: bool
    imports: tuple[str, ...]
    current_dir: str


def run_trial(config: dict[str, Any], task: SweepTask) -> None:
    """Train one trial until it ends, and record the end in its run. Raises no error of the training."""
    # Time for a paused trial to write its checkpoint.
    os.environ["TUNE_FUNCTION_THREAD_TIMEOUT_S"] = "60"
    if os.path.isdir(task.current_dir):
        os.chdir(task.current_dir)
    sys.path[:0] = [path for path in task.imports if path not in sys.path]
    if read_stop_request(Folder(task.sweep_dir)) is not None:
        return
    name = tune.get_context().get_trial_name()
    run = Run(Folder(task.sweep_dir).path(name))
    experiment = replace(_with_values(_experiment_of(task.experiment), config), name=name, storage=task.sweep_dir)
    # From the sweep's driver, or from an earlier process of this trial that may be on a lost machine.
    with own_folder(run.folder, take_over=True) as ownership:
        run.update(
            status="running", reason="", error=None, started=now(), ended=None, driver=Driver.this(),
            claim=ownership.id,
        )  # fmt: skip
        _train_trial(run, experiment, config, task)


def _train_trial(run: Run, experiment: Experiment, config: dict[str, Any], task: SweepTask) -> None:
    """Train a trial that this process owns."""
    resume = _resume_from(run, config["resume"])
    reporter = TuneReportCallback(task, run)
    adopted = (KeepOwnHyperparameters(),) if resume != "auto" else ()
    trains_here = experiment.scaling.is_single_worker
    display = RunConsole(Console(quiet=True)) if trains_here else EventTuneReporter(task, run)
    try:
        result = RunDriver(
            experiment, run, StopSignals(), display, verbose=False, spares=False,
            train=partial(_train_here, callbacks=(reporter, *adopted)) if trains_here else run_worker_group,
            # The sweep's driver enforces the wait: a trial may have to wait for others to end.
            enforce_wait=False,
            resume_options=ResumeOptions(resume=resume, accept_changes=task.may_change),
        ).run()  # fmt: skip
        if result.status == "completed":
            _check_metric(task.metric, result.metrics, "a trial")
    except RunConflictError:
        # The trial's files belong to another process now.
        return
    except Exception as error:
        run.update(status="failed", reason="", error=summarize_error(error), ended=now())
        write_driver_ended(run, "failed")
        return
    if task.may_change:
        # A checkpoint of another trial contains that trial's best value.
        best = retry_storage(lambda: _best_of_own_evaluations(run, task))
        result = replace(result, best_metric=best.value, best_step=best.step)
    close(run, result, display)
    if reporter.was_paused:
        # Ray Tune expects a paused trial's function to end this way.
        sys.exit(0)


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
    task = make_task(experiment, run, resume_options=resume_options, verbose=verbose)
    # Notices come from Ray Train, which does not run here.
    task = replace(task, polls_preemption=False)
    watch = retry_policy(experiment, run)
    while True:
        try:
            return run_attempt(task, lambda: (experiment.trainer, experiment.config), callbacks)
        except Exception as error:
            wait_to_restart(run.folder, watch.decide({0: error}).delay_s)


class EventTuneReporter(RunConsole):
    """Reports the evaluations of a multi-worker run to Ray Tune, from its events. Prints nothing.

    The workers do not wait for it; they receive the scheduler's decision as a request to stop.

    Args:
        task: settings of the sweep.
        run: run of the trial. Evaluations of an earlier process are counted, too.
    """

    def __init__(self, task: SweepTask, run: Run) -> None:
        super().__init__(Console(quiet=True))
        self._sweep_task = task
        self._evaluated = set(retry_storage(lambda: metric_by_step(run.folder, task.metric)))

    def event(self, event: Event) -> None:
        """Report an evaluation.

        Raises:
            ConfigError: the evaluation lacks the metric of the sweep.
        """
        if event["event"] != "evaluated":
            return
        _check_metric(self._sweep_task.metric, event["metrics"], "an evaluation")
        step, value = event["step"], event["metrics"][self._sweep_task.metric]
        self._evaluated.add(step)
        tune.report(make_report(self._sweep_task, value, _count_up_to(self._evaluated, step), step))


def _count_up_to(steps: Collection[int], step: int) -> int:
    """Return the number of steps up to `step`. Counting continues across restarts; repeats keep their number."""
    return sum(each <= step for each in steps)


def make_report(asked: SweepTask | Search, value: float, evaluations: int, step: int) -> dict[str, Any]:
    """Return the report of an evaluation to Ray Tune; a non-finite value is reported as the worst."""
    worst = _WORST if asked.mode == "min" else -_WORST
    is_finite = math.isfinite(value)
    return {
        asked.metric: value if is_finite else worst, "evaluations": evaluations, "training_iteration": evaluations,
        "step": step, "is_finite": is_finite,
    }  # fmt: skip


def _check_metric(metric: str, metrics: Mapping[str, float], of: str) -> None:
    if metric not in metrics:
        raise ConfigError(f"metric is {metric!r}, but {of} logs {', '.join(metrics) or 'no metric'}")


class TuneReportCallback(Callback):
    """Reports the sweep's metric of a single-worker trial to Ray Tune, and follows the scheduler's decision.

    Args:
        task: settings of the sweep.
        run: run of the trial.

    Attributes:
        was_paused: whether the scheduler paused the trial, to resume it later.
    """

    def __init__(self, task: SweepTask, run: Run) -> None:
        self.was_paused = False
        self._task, self._run = task, run
        # Evaluations that wait for their checkpoint: (number, step, value).
        self._evaluated: list[tuple[int, int, float]] = []
        # Steps with a log record of a train/* metric, which a scheduler counts like evaluations.
        self._logged: set[int] = set()

    def on_fit_start(self, trainer: Trainer[Any]) -> None:
        """Read which steps earlier attempts have reported."""
        if self._task.metric.startswith("train/"):
            self._logged = set(metric_by_step(self._run.folder, self._task.metric))

    def on_evaluation_end(self, trainer: Trainer[Any], metrics: Mapping[str, float]) -> None:
        """Report the evaluation, or request the checkpoint to report with it."""
        if not self._task.metric.startswith("validation/"):
            return
        _check_metric(self._task.metric, metrics, "an evaluation")
        # The loop increases its counter after the callbacks.
        evaluated = (trainer.progress.evaluations + 1, trainer.global_step, metrics[self._task.metric])
        if self._task.pauses:
            self._evaluated.append(evaluated)
            trainer.request_save()
        else:
            self._report(trainer, *evaluated)

    def on_log(self, trainer: Trainer[Any], metrics: Mapping[str, float]) -> None:
        """Report a train/* metric."""
        if self._task.metric.startswith("train/") and self._task.metric in metrics:
            step = trainer.global_step
            self._logged.add(step)
            self._report(trainer, _count_up_to(self._logged, step), step, metrics[self._task.metric])

    def on_checkpoint_saved(self, trainer: Trainer[Any], checkpoint: Any) -> None:
        """Report the evaluations up to this checkpoint, with a pointer to it."""
        while self._evaluated and self._evaluated[0][1] <= checkpoint.step:
            self._report(trainer, *self._evaluated.pop(0), str(checkpoint.path))

    def _report(
        self, trainer: Trainer[Any], evaluations: int, step: int, value: float, checkpoint: str | None = None
    ) -> None:
        if self.was_paused:
            return
        report = make_report(self._task, value, evaluations, step)
        try:
            if checkpoint is None:
                tune.report(report)
            else:
                with tempfile.TemporaryDirectory(prefix="headway-pointer-") as folder:
                    pointer = {"run_dir": self._run.run_dir, "checkpoint": checkpoint}
                    Path(folder, _POINTER).write_text(json.dumps(pointer))
                    tune.report(report, checkpoint=tune.Checkpoint.from_directory(folder))
        except SystemExit:
            # Raised by Ray Tune inside the report to pause the trial.
            self.was_paused = True
            trainer.request_stop(PAUSED, status="interrupted")
            return
        # `RunCallback` handles an abort, which saves nothing.
        if (asked := read_stop_request(self._run.folder)) is not None and not asked.abort:
            trainer.request_stop(asked.reason, status=asked.status)


class KeepOwnHyperparameters(Callback):
    """Keeps this trial's optimizer hyperparameters when it resumes from a checkpoint of another trial.

    Restoring a checkpoint restores the hyperparameters that it was saved with. A learning rate set by a schedule keeps
    its position in the schedule, scaled to this trial's initial value.
    """

    def __init__(self) -> None:
        self._wanted: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def on_setup_end(self, trainer: Trainer[Any]) -> None:
        """Store the hyperparameters that follow from the config."""
        self._wanted = [
            (group, {name: value for name, value in group.items() if name != "params"})
            for optimizer in trainer.optimizers.values()
            for group in optimizer.param_groups
        ]

    def on_restored(self, trainer: Trainer[Any]) -> None:
        """Apply the stored hyperparameters."""
        groups = [group for optimizer in trainer.optimizers.values() for group in optimizer.param_groups]
        for group, (_, wanted) in zip(groups, self._wanted, strict=True):
            if "initial_lr" in wanted and group.get("initial_lr"):
                wanted = {**wanted, "lr": wanted["initial_lr"] * group["lr"] / group["initial_lr"]}
            group.update(wanted)
        for scheduler in trainer.schedulers.values():
            if hasattr(scheduler, "base_lrs"):
                scheduler.base_lrs = [group["initial_lr"] for group in scheduler.optimizer.param_groups]


@lru_cache(maxsize=1)
def _experiment_of(pickled: bytes) -> Any:
    """Unpickle the experiment. Cached: a process trains one trial after another."""
    return ray.cloudpickle.loads(pickled)


def _with_values(settings: Any, values: Mapping[str, Any]) -> Any:
    """Return a dataclass with the values at dotted paths, which the driver has checked; ignores other paths.

    Unlike `config.override`, it does not use the types of fields, which a class pickled by value cannot resolve.
    """
    changes: dict[str, Any] = {}
    names = {each.split(".")[0] for each in values}
    for name in names & {each.name for each in fields(settings)}:
        below = {each.partition(".")[2]: value for each, value in values.items() if each.startswith(f"{name}.")}
        changes[name] = values[name] if name in values else _with_values(getattr(settings, name), below)
    return replace(settings, **changes)


def _resume_from(run: Run, resume: str) -> str:
    """Return "auto" once this trial has saved a checkpoint; before, what the driver chose."""
    checkpoint = tune.get_checkpoint()
    has_saved = checkpoint is not None and read_pointer(checkpoint)["run_dir"] == run.run_dir
    return "auto" if has_saved else resume


def trial_resources(scaling: Scaling, values: Mapping[str, Any]) -> Any:
    """Return the resources of a trial's process: its single worker's, or almost none beside workers.

    Args:
        scaling: the resources of the experiment.
        values: settings of the trial by path, some of which may be below `scaling`.
    """
    changes = {path.removeprefix("scaling."): each for path, each in values.items() if path.startswith("scaling.")}
    scaling = _with_values(scaling, changes)
    # Ray Tune rejects an empty reservation, and any fraction of a CPU would be missing for the workers.
    return tune.PlacementGroupFactory([scaling.worker_resources if scaling.is_single_worker else {"memory": 1}])


def read_pointer(checkpoint: Any) -> dict[str, str]:
    """Return Headway's run and checkpoint that a checkpoint of Ray Tune points to."""
    with checkpoint.as_directory() as folder:
        pointer: dict[str, str] = json.loads(Path(folder, _POINTER).read_text())
    return pointer
