"""Reports of a trial to Ray Tune, from the process that trains it or from the events of its workers."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rich.console import Console

from headway.trainer.callbacks.base import Callback
from headway.trainer.checkpoints.retention import Mode
from headway.trainer.checkpoints.scan import scan
from headway.trainer.checkpoints.storage import open_storage
from headway.trainer.errors import ConfigError
from headway.trainer.trainer import Trainer

from ...display.console import RunConsole
from ...runs.metric_history import metric_by_step, metrics_at
from ...runs.pointer import Pointer, write_pointer
from ...runs.requests import StopRequest, read_stop_request, request_stop
from ...runs.run import Run
from ...storage.events import Event, read_events
from ...storage.folder import Folder

ENDED_BY_TUNE = "ended or paused by Ray Tune"
# Reported to the scheduler for an evaluation without a finite value.
_WORST = 1e30


def make_report(metric: str, mode: Mode, value: float, evaluations: int, step: int) -> dict[str, Any]:
    """Return the report of an evaluation in a sweep; a non-finite value is reported as the worst."""
    worst = _WORST if mode == "min" else -_WORST
    is_finite = math.isfinite(value)
    return {
        metric: value if is_finite else worst, "evaluations": evaluations, "training_iteration": evaluations,
        "step": step, "is_finite": is_finite,
    }  # fmt: skip


def check_metric(metric: str | None, metrics: Mapping[str, float], of: str, named_by: str = "metric is") -> None:
    """Check that there is a value of the metric.

    Args:
        metric: its name; None: any will do.
        metrics: the metrics that there are.
        of: what has logged them.
        named_by: the field that names the metric, with a verb.

    Raises:
        ConfigError: there is none.
    """
    if metric is not None and metric not in metrics:
        raise ConfigError(f"{named_by} {metric!r}, but {of} logs {', '.join(metrics) or 'no metric'}")


class TuneReporter:
    """Reports the evaluations of one trial to Ray Tune, each with a pointer to its checkpoint if it saves one.

    Args:
        run_dir: folder of the trial's run.
        metric: a metric that each evaluation must have; None: any will do.
        saves: whether an evaluation is reported only once its checkpoint is complete.
        is_adopted: whether the trial starts from a checkpoint of another trial.
        mode: "min" or "max" in a sweep, which reports the metric alone; None reports all metrics, to a user's `Tuner`.

    Attributes:
        has_ended: whether Ray Tune has ended or paused the trial.
        after_report: called after each report, when Ray Tune has decided how the trial continues.
    """

    def __init__(
        self, run_dir: str, metric: str | None, *, saves: bool, is_adopted: bool = False, mode: Mode | None = None
    ) -> None:
        self.has_ended = False
        self.after_report: Callable[[], None] = lambda: None
        self.folder = Folder(run_dir)
        self._metric, self._saves, self._is_adopted, self._mode = metric, saves, is_adopted, mode
        self._metrics: dict[str, float] = {}
        # Evaluations that wait for their checkpoint: step and report.
        self._waiting: list[tuple[int, dict[str, Any]]] = []
        self._has_reported, self._reported_checkpoint = False, ""
        # Steps with a record of a train/* metric, which a scheduler counts like evaluations.
        judges_training = mode is not None and metric is not None and metric.startswith("train/")
        self._logged = set(metric_by_step(self.folder, str(metric))) if judges_training else None

    def callbacks(self, *, trains_here: bool) -> list[Callback]:
        """Return the callbacks of the trial, one of which reports its evaluations if it trains in this process."""
        found: list[Callback] = [ReportEvaluations(self)] if trains_here else []
        if self._saves:
            found.append(SaveEvaluations())
        if self._is_adopted:
            found.append(KeepOwnHyperparameters())
        return found

    def logged(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the metrics of the training for the next report, or report the metric of the sweep if it is one."""
        self._metrics.update(metrics)
        if self._logged is not None and self._metric in metrics:
            self._logged.add(step)
            self._report(self._make_report(step, sum(each <= step for each in self._logged)))

    def evaluated(self, step: int, metrics: Mapping[str, float], evaluations: int) -> None:
        """Report an evaluation, or keep it until its checkpoint is complete.

        Raises:
            ConfigError: it lacks the metric.
        """
        if self._logged is not None:
            return
        check_metric(self._metric, metrics, "an evaluation")
        self._metrics.update(metrics)
        self._waiting.append((step, self._make_report(step, evaluations)))
        if not self._saves:
            self.saved(step, "")

    def saved(self, step: int, checkpoint: str) -> None:
        """Report the evaluations up to a checkpoint, with a pointer to it."""
        due = [report for at, report in self._waiting if at <= step]
        self._waiting = self._waiting[len(due) :]
        for report in due:
            self._report(report, checkpoint)

    def restored(self, step: int) -> None:
        """Report the evaluations up to a restored checkpoint that Ray Tune does not know.

        The process may have died between a checkpoint and its report, or Ray Tune may have restored an older state.
        """
        # Later ones will be made again.
        self._waiting = []
        if self._saves and not self._is_adopted and self._logged is None:
            for report, checkpoint in self._missed(step):
                self._report(report, checkpoint)

    def _missed(self, step: int) -> list[tuple[dict[str, Any], str]]:
        """Return the reports, with their checkpoints, after the last one that Ray Tune knows, up to a step."""
        from ray import tune

        from ...train.ray_train_thread import last_pointer

        known, last = -1, last_pointer(tune)
        if last is not None:
            if last.reported_step is None:
                return []
            known = last.reported_step
        events = read_events(self.folder)
        evaluated = {event["step"]: event for event in events if event["event"] == "evaluated"}
        steps = sorted(each for each in evaluated if known < each <= step)
        if self._mode is not None and last is None:
            # An earlier driver of the sweep has had the others.
            steps = steps[-1:]
        if not steps:
            return []
        # A process that died just after a checkpoint has not written its event.
        there = scan(open_storage(self.folder.path("checkpoints")))
        saved = {each.checkpoint.step: each.checkpoint.path for each in there if each.checkpoint}
        saved |= {event["step"]: event["path"] for event in events if event["event"] == "checkpoint_saved"}
        found = []
        for each, metrics in metrics_at(self.folder, steps).items():
            self._metrics.update(metrics)
            check_metric(self._metric, evaluated[each]["metrics"], "an evaluation")
            self._metrics.update(evaluated[each]["metrics"])
            after = min((at for at in saved if each <= at <= step), default=None)
            report = self._make_report(each, evaluated[each]["evaluations"])
            found.append((report, "" if after is None else saved[after]))
        return found

    def finish(self, result: Mapping[str, Any]) -> None:
        """Report the end of a run that has reported nothing, or whose last checkpoint Ray Tune does not know.

        Args:
            result: the fields of `RunResult`.
        """
        if not self._has_reported:
            # The run had ended before this process began.
            self.restored(result["steps"])
        last = result["last_checkpoint"] or ""
        if result["metrics"] and (not self._has_reported or last != self._reported_checkpoint):
            self._report({**result["metrics"], "step": result["steps"]}, last)

    def _make_report(self, step: int, evaluations: int) -> dict[str, Any]:
        if self._mode is not None and self._metric is not None:
            return make_report(self._metric, self._mode, self._metrics[self._metric], evaluations, step)
        return {**self._metrics, "step": step, "evaluations": evaluations}

    def _report(self, report: dict[str, Any], checkpoint: str = "") -> None:
        """Report to Ray Tune; returns once that has decided how the trial continues."""
        # Imported here, because the callbacks below travel to workers, which do without.
        from ray import tune

        from ...train.ray_train_thread import call_ray

        if self.has_ended:
            return
        self._has_reported = True
        try:
            if not checkpoint:
                call_ray(tune, "report", report)
            else:
                self._reported_checkpoint = checkpoint
                pointer = Pointer(run_dir=self.folder.place, checkpoint=checkpoint, reported_step=report["step"])
                with tempfile.TemporaryDirectory(prefix="headway-pointer-") as folder:
                    write_pointer(pointer, folder)
                    call_ray(tune, "report", report, checkpoint=tune.Checkpoint.from_directory(folder))
        except SystemExit:
            # Raised by Ray Tune inside the report to end or pause the trial.
            self.has_ended = True
        self.after_report()


class ReportEvaluations(Callback):
    """Reports the evaluations of a trial that trains in this process, and follows Ray Tune's decision at once.

    Args:
        reporter: of the trial.
    """

    def __init__(self, reporter: TuneReporter) -> None:
        self._reporter = reporter

    def on_setup_start(self, trainer: Trainer[Any]) -> None:
        """Follow Ray Tune's decisions from now on."""
        self._reporter.after_report = partial(self._follow, trainer)

    def on_restored(self, trainer: Trainer[Any]) -> None:
        """Report what Ray Tune does not know of the restored run."""
        self._reporter.restored(trainer.global_step)

    def on_log(self, trainer: Trainer[Any], metrics: Mapping[str, float]) -> None:
        """Hand over the metrics of the training."""
        self._reporter.logged(trainer.global_step, metrics)

    def on_evaluation_end(self, trainer: Trainer[Any], metrics: Mapping[str, float]) -> None:
        """Hand over the evaluation."""
        # The loop increases its counter after the callbacks.
        self._reporter.evaluated(trainer.global_step, metrics, trainer.progress.evaluations + 1)

    def on_checkpoint_saved(self, trainer: Trainer[Any], checkpoint: Any) -> None:
        """Hand over the checkpoint."""
        self._reporter.saved(checkpoint.step, str(checkpoint.path))

    def on_fit_end(self, trainer: Trainer[Any], error: BaseException | None) -> None:
        """Follow no further decisions."""
        self._reporter.after_report = lambda: None

    def _follow(self, trainer: Trainer[Any]) -> None:
        if self._reporter.has_ended:
            trainer.request_stop(ENDED_BY_TUNE, status="interrupted")
        # A scheduler of a sweep writes its decision during the report. `RunCallback` handles an abort.
        elif (asked := read_stop_request(self._reporter.folder)) is not None and not asked.abort:
            trainer.request_stop(asked.reason, status=asked.status)


class EventReporter(RunConsole):
    """Reports the evaluations of a trial of several workers from its events. Prints nothing.

    The workers do not wait; they receive the scheduler's decision as a request to stop.

    Args:
        reporter: of the trial.
    """

    def __init__(self, reporter: TuneReporter) -> None:
        super().__init__(Console(quiet=True))
        self._reporter = reporter
        # Ray Tune may have started the trial again in another process before this one requests the stop.
        self._start = Run(reporter.folder).lease

    def event(self, event: Event) -> None:
        """Report an evaluation, once its checkpoint is complete."""
        if event["event"] == "evaluated":
            self._reporter.evaluated(event["step"], event["metrics"], event["evaluations"])
        elif event["event"] == "checkpoint_saved":
            self._reporter.saved(event["step"], event["path"])
        elif event["event"] == "restored":
            self._reporter.restored(event["step"])
        folder = self._reporter.folder
        if self._reporter.has_ended and read_stop_request(folder) is None:
            request_stop(folder, StopRequest(reason=ENDED_BY_TUNE, status="interrupted", start=self._start))


class SaveEvaluations(Callback):
    """Saves a checkpoint with each evaluation."""

    def on_evaluation_end(self, trainer: Trainer[Any], metrics: Mapping[str, float]) -> None:
        """Request it."""
        if trainer.world.is_main:
            trainer.request_save()


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
