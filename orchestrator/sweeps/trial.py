"""What runs in the process of one trial: the supervision of its run, with the training in the same process.

Ray Tune hears of evaluations only. A trial of one worker trains right here; one of several has Ray Train start them.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
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
from ..runs.requests import read_stop_request
from ..runs.resume import ResumeOptions
from ..runs.run import Driver, Run, now
from ..storage.events import Event, read_events
from ..storage.folder import Folder, retry_storage
from ..train.driver import RunDriver
from ..train.fit import close, summarize_error, write_driver_ended
from ..train.signals import StopSignals
from ..train.worker import run_attempt
from ..train.worker_group import make_task, retry_policy, run_worker_group

if TYPE_CHECKING:
    from .search import Search

# What a scheduler takes for the value of an evaluation that gave none.
_WORST = 1e30
_POINTER = "headway.json"
PAUSED = "paused by the scheduler"


@dataclass(frozen=True, kw_only=True)
class SweepTask:
    """What the sweep's driver tells all trials.

    Attributes:
        experiment: pickled, without the values of a trial: its trainer's class from a user's file travels by value.
        sweep_dir: of the sweep.
        metric, mode: what is looked for.
        pauses: whether the scheduler needs a checkpoint of each evaluation.
        may_change: whether a trial goes on with other values than it began with.
        trains_here: whether a trial trains in the process that Ray Tune gives it, and has no workers of its own.
        imports: folders that the driver imports from, besides its packages.
        current_dir: of the driver.
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
    """Train one trial to its end, whatever it is; its run says which."""
    # A trial that is paused still writes a checkpoint.
    os.environ["TUNE_FUNCTION_THREAD_TIMEOUT_S"] = "60"
    if os.path.isdir(task.current_dir):
        os.chdir(task.current_dir)
    sys.path[:0] = [path for path in task.imports if path not in sys.path]
    if read_stop_request(Folder(task.sweep_dir)) is not None:
        return
    name = tune.get_context().get_trial_name()
    run = Run(Folder(task.sweep_dir).path(name))
    experiment = replace(_with_values(_experiment_of(task.experiment), config), name=name, storage=task.sweep_dir)
    run.update(status="running", reason="", error=None, started=now(), ended=None, driver=Driver.this())
    resume = _resume_from(run, config["resume"])
    reporter = TuneReportCallback(task, run)
    adopted = (KeepOwnHyperparameters(),) if resume != "auto" else ()

    def train_here(
        experiment: Experiment, run: Run, *, since: float, resume_options: ResumeOptions, verbose: bool, **_: Any
    ) -> dict[str, Any]:
        return _train_here(
            experiment, run, (reporter, *adopted), since=since, resume_options=resume_options, verbose=verbose
        )

    display = RunConsole(Console(quiet=True)) if task.trains_here else EventTuneReporter(task, run)
    try:
        result = RunDriver(
            experiment, run, StopSignals(), display, verbose=False, spares=False,
            train=train_here if task.trains_here else run_worker_group,
            # The driver does, where no trial has its workers: one waits for others to end as well.
            enforce_wait=False,
            resume_options=ResumeOptions(resume=resume, accept_changes=task.may_change),
        ).run()  # fmt: skip
        if result.status == "completed":
            _check_metric(task.metric, result.metrics, "a trial")
    except RunConflictError:
        # Another process trains it now, and its files are that one's.
        return
    except Exception as error:
        run.update(status="failed", reason="", error=summarize_error(error), ended=now())
        write_driver_ended(run, "failed")
        return
    if task.may_change:
        # A checkpoint of another trial brings that one's best value with it.
        best = retry_storage(lambda: _best_of_own_evaluations(run, task))
        result = replace(result, best_metric=best.value, best_step=best.step)
    close(run, result, display)
    if reporter.was_paused:
        # As Ray Tune ends the function of a trial that it pauses.
        sys.exit(0)


def _best_of_own_evaluations(run: Run, task: SweepTask) -> Best:
    """The best value among the evaluations that a run has made itself."""
    best = Best(task.mode)
    for event in read_events(run.folder):
        # Of two after the same step each is one of other weights, where it went on from a checkpoint of before.
        if event["event"] == "evaluated" and task.metric in event["metrics"]:
            best.update(event["metrics"][task.metric], step=event["step"])
    return best


def _train_here(
    experiment: Experiment,
    run: Run,
    callbacks: Sequence[Callback],
    *,
    since: float,
    resume_options: ResumeOptions,
    verbose: bool,
) -> dict[str, Any]:
    """Train in this process, again and again as the retries of the experiment allow. A process that dies is Tune's."""
    task = make_task(experiment, run, since=since, resume_options=resume_options, verbose=verbose)
    # Who would give notice is Ray Train.
    task = replace(task, polls_preemption=False)
    watch = retry_policy(experiment, run, since=since)
    while True:
        try:
            return run_attempt(task, lambda: (experiment.trainer, experiment.config), callbacks)
        except Exception as error:
            watch.decide({0: error})


class EventTuneReporter(RunConsole):
    """Reports the evaluations of a run of several workers to Ray Tune, from their events. Prints nothing.

    The workers do not wait for it; what the scheduler says they hear as any wish to stop.

    Args:
        task: of the sweep.
        run: of the trial. Evaluations that an earlier process of it has made count, too.
    """

    def __init__(self, task: SweepTask, run: Run) -> None:
        super().__init__(Console(quiet=True))
        self._sweep_task = task
        self._evaluated = set(retry_storage(lambda: metric_by_step(run.folder, task.metric)))

    def event(self, event: Event) -> None:
        """Report an evaluation.

        Raises:
            ConfigError: it does not give the metric of the sweep.
        """
        if event["event"] != "evaluated":
            return
        _check_metric(self._sweep_task.metric, event["metrics"], "an evaluation")
        step, value = event["step"], event["metrics"][self._sweep_task.metric]
        self._evaluated.add(step)
        tune.report(make_report(self._sweep_task, value, _count_up_to(self._evaluated, step), step))


def _count_up_to(steps: Collection[int], step: int) -> int:
    """How many there are: what comes after a restart is counted on, and what is made again has the same number."""
    return sum(each <= step for each in steps)


def make_report(asked: SweepTask | Search, value: float, evaluations: int, step: int) -> dict[str, Any]:
    """Return what Ray Tune is told of an evaluation; one that measured nothing finite is the worst."""
    worst = _WORST if asked.mode == "min" else -_WORST
    is_finite = math.isfinite(value)
    return {
        asked.metric: value if is_finite else worst, "evaluations": evaluations, "step": step, "is_finite": is_finite,
    }  # fmt: skip


def _check_metric(metric: str, metrics: Mapping[str, float], of: str) -> None:
    if metric not in metrics:
        raise ConfigError(f"metric is {metric!r}, but {of} gives {', '.join(metrics) or 'none'}")


class TuneReportCallback(Callback):
    """Reports the sweep's metric of a single-worker trial to Ray Tune, and follows the scheduler's decision.

    Args:
        task: of the sweep.
        run: of the trial.

    Attributes:
        was_paused: whether the scheduler wants to go on with the trial later.
    """

    def __init__(self, task: SweepTask, run: Run) -> None:
        self.was_paused = False
        self._task, self._run = task, run
        # What waits for its checkpoint: the number of the evaluation, its step and its value.
        self._evaluated: list[tuple[int, int, float]] = []
        # With a metric of the training the records of it are what a scheduler counts.
        self._logged: set[int] = set()

    def on_fit_start(self, trainer: Trainer[Any]) -> None:
        """Takes note of what was reported before this attempt."""
        if self._task.metric.startswith("train/"):
            self._logged = set(metric_by_step(self._run.folder, self._task.metric))

    def on_evaluation_end(self, trainer: Trainer[Any], metrics: Mapping[str, float]) -> None:
        """Reports, or asks for the checkpoint that goes with the report."""
        if not self._task.metric.startswith("validation/"):
            return
        _check_metric(self._task.metric, metrics, "an evaluation")
        # The loop counts it when all callbacks have heard of it.
        evaluated = (trainer.progress.evaluations + 1, trainer.global_step, metrics[self._task.metric])
        if self._task.pauses:
            self._evaluated.append(evaluated)
            trainer.request_save()
        else:
            self._report(trainer, *evaluated)

    def on_log(self, trainer: Trainer[Any], metrics: Mapping[str, float]) -> None:
        """Report a metric of the training."""
        if self._task.metric.startswith("train/") and self._task.metric in metrics:
            step = trainer.global_step
            self._logged.add(step)
            self._report(trainer, _count_up_to(self._logged, step), step, metrics[self._task.metric])

    def on_checkpoint_saved(self, trainer: Trainer[Any], checkpoint: Any) -> None:
        """Report the evaluation before, with a pointer to the checkpoint; one that came while it was saved waits."""
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
            # Ray Tune ends a paused trial so, inside of the report.
            self.was_paused = True
            trainer.request_stop(PAUSED, status="interrupted")
            return
        # Who ends at once saves nothing, and hears of it from the bridge.
        if (asked := read_stop_request(self._run.folder)) is not None and not asked.abort:
            trainer.request_stop(asked.reason, status=asked.status)


class KeepOwnHyperparameters(Callback):
    """Keeps this trial's optimizer hyperparameters when it resumes from a checkpoint of another trial.

    A checkpoint has the settings that it was saved with. Where a schedule moves the learning rate, it goes on from
    where it is, in proportion to the new one.
    """

    def __init__(self) -> None:
        self._wanted: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def on_setup_end(self, trainer: Trainer[Any]) -> None:
        """Takes note of the settings as the config has them."""
        self._wanted = [
            (group, {name: value for name, value in group.items() if name != "params"})
            for optimizer in trainer.optimizers.values()
            for group in optimizer.param_groups
        ]

    def on_restored(self, trainer: Trainer[Any]) -> None:
        """Put them in force."""
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
    """Once in a process, which trains one trial after another."""
    return ray.cloudpickle.loads(pickled)


def _with_values(settings: Any, values: Mapping[str, Any]) -> Any:
    """Return a dataclass with the values at some dotted paths, which the driver has checked; others are passed over.

    Without the types of the fields, unlike `config.override`: a class that came by value cannot tell them.
    """
    changes: dict[str, Any] = {}
    names = {each.split(".")[0] for each in values}
    for name in names & {each.name for each in fields(settings)}:
        below = {each.partition(".")[2]: value for each, value in values.items() if each.startswith(f"{name}.")}
        changes[name] = values[name] if name in values else _with_values(getattr(settings, name), below)
    return replace(settings, **changes)


def _resume_from(run: Run, resume: str) -> str:
    """Return "auto", or the checkpoint of another trial that the driver says, until this one has saved its own."""
    checkpoint = tune.get_checkpoint()
    has_saved = checkpoint is not None and read_pointer(checkpoint)["run_dir"] == run.run_dir
    return "auto" if has_saved else resume


def trial_resources(scaling: Scaling) -> Any:
    """Return what the process of a trial reserves: as the only worker, or next to nothing beside workers."""
    # Ray Tune refuses nothing at all, and any part of a CPU would be missing for the workers.
    return tune.PlacementGroupFactory([scaling.worker_resources if scaling.is_single_worker else {"memory": 1}])


def read_pointer(checkpoint: Any) -> dict[str, str]:
    """Return the run and the checkpoint of ours that a checkpoint of Ray Tune points to."""
    with checkpoint.as_directory() as folder:
        pointer: dict[str, str] = json.loads(Path(folder, _POINTER).read_text())
    return pointer
