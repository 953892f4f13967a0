"""`trainable(experiment)`: the function that a `Tuner` of the user's runs, with one run of the experiment per trial."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import ray
from ray import tune
from rich.console import Console

from headway.trainer.callbacks.base import Callback
from headway.trainer.checkpoints.store import read_checkpoint
from headway.trainer.errors import CheckpointError, ConfigError
from headway.trainer.trainer import Trainer

from ..cli.console import RunConsole
from ..config.experiment import Experiment
from ..errors import StorageError
from ..runs.open import open_run
from ..runs.pointer import Pointer, read_pointer, write_pointer
from ..runs.requests import StopRequest, request_stop
from ..runs.result import RunResult
from ..runs.resume import ResumeOptions
from ..runs.run import Run, now
from ..storage.events import Event
from ..train.driver import RunDriver
from ..train.fit import close, finished_result, summarize_error, write_driver_ended
from ..train.signals import StopSignals
from ..train.train_loop import Start, train_rank
from .trial import KeepOwnHyperparameters, trial_resources

ENDED_BY_TUNE = "ended or paused by Ray Tune"


def trainable(experiment: Experiment, *, metric: str | None = None) -> Any:
    """Return the function for a `ray.tune.Tuner`, whose trials are runs of the experiment with the trial's values.

    The parameters of a search space are dotted paths, such as "config.learning_rate". The run of a trial has the name
    of the trial, and is in the folder `<storage>/<name>` of the experiment. Each evaluation is reported to Ray Tune
    with all metrics and "step". A trial of one worker also saves a checkpoint at each evaluation and reports a pointer
    to it, by which Ray Tune resumes, pauses and clones trials; `checkpoint_path` gives the checkpoint. With several
    workers, Ray Train starts them beside the process of the trial, and the newest checkpoint is reported.

    Ray Tune retries a trial of one worker, by its `FailureConfig`; a trial of several is retried by `retries`.

    Args:
        experiment: what to train; `scaling` gives the resources of a trial.
        metric: a metric that each evaluation must have, such as "validation/loss"; None: any will do.

    Raises:
        ConfigError: the trainer cannot be pickled.

    Example:
        >>> from ray import tune
        >>> experiment = Experiment(name="digits", trainer=Digits, config=config)
        >>> tuner = tune.Tuner(
        ...     trainable(experiment, metric="validation/loss"),
        ...     param_space={"config.learning_rate": tune.loguniform(1e-4, 1e-1)},
        ...     tune_config=tune.TuneConfig(metric="validation/loss", mode="min", num_samples=40),
        ... )
        >>> # results = tuner.fit()
    """
    start, scaling = Start.of(experiment, ResumeOptions(accept_changes=True)), experiment.scaling

    def train_trial(config: dict[str, Any]) -> None:
        run_trial(start, config, metric)

    def resources(config: dict[str, Any]) -> Any:
        return trial_resources(scaling, config)

    # Ray Tune names trials after the function.
    train_trial.__name__ = experiment.name
    return tune.with_resources(train_trial, resources)


def run_trial(start: Start, config: Mapping[str, Any], metric: str | None) -> None:
    """Train one trial in the process that Ray Tune has started for it. Raises whatever the trainer raises.

    Args:
        start: of the process that called `trainable`.
        config: the trial's values at dotted paths.
        metric: a metric that each evaluation must have.
    """
    # Time for a trial that Ray Tune ends to save, where its process is used again.
    os.environ.setdefault("TUNE_FUNCTION_THREAD_TIMEOUT_S", "60")
    experiment = start.enter(config)
    name = tune.get_context().get_trial_name()
    experiment = replace(experiment, name=name, storage=experiment.run_dir)
    source = _source_of(experiment.run_dir)
    start = replace(start, resume_options=replace(start.resume_options, resume=source or "auto"))
    reporter = TuneReporter(metric, experiment.run_dir)
    if experiment.scaling.is_single_worker:
        callbacks = [EvaluationCallback(reporter), *([KeepOwnHyperparameters()] if source else [])]
        # A trial has one process at a time; its last one may have been on a machine that is lost.
        result = train_rank(
            start, experiment, on_cpu=not ray.get_gpu_ids(), reports=False, callbacks=callbacks, take_over=True
        )
    else:
        result = asdict(_drive(start, experiment, reporter))
    reporter.finish(result)
    if reporter.has_ended:
        # Ray Tune expects a paused trial's function to end this way.
        sys.exit(0)


def _source_of(run_dir: str) -> str | None:
    """Return the checkpoint of another trial from which Ray Tune starts this one; None to resume its own run."""
    checkpoint = tune.get_checkpoint()
    if checkpoint is None or (pointer := read_pointer(checkpoint)).run_dir == run_dir:
        return None
    try:
        read_checkpoint(pointer.checkpoint)
    except CheckpointError:
        # The other trial has gone on, and its retention has deleted the checkpoint.
        newest = Run(pointer.run_dir).record.last_checkpoint
        return newest or pointer.checkpoint
    return pointer.checkpoint


class TuneReporter:
    """Reports the evaluations of one trial to Ray Tune.

    Args:
        metric: a metric that each evaluation must have.
        run_dir: folder of the trial's run.

    Attributes:
        has_ended: whether Ray Tune has ended or paused the trial.
    """

    def __init__(self, metric: str | None, run_dir: str) -> None:
        self.has_ended = False
        self._metric, self._run_dir = metric, run_dir
        self._reported: str | None = None
        self._has_reported = False

    def check(self, metrics: Mapping[str, float]) -> None:
        """Check that an evaluation has the metric.

        Raises:
            ConfigError: it has not.
        """
        if self._metric is not None and self._metric not in metrics:
            raise ConfigError(f"metric is {self._metric!r}, but an evaluation logs {', '.join(metrics) or 'no metric'}")

    def report(self, metrics: Mapping[str, float], step: int, checkpoint: str | None) -> None:
        """Report an evaluation; blocks until Ray Tune has decided how the trial continues.

        Args:
            metrics: all metrics.
            step: of the evaluation.
            checkpoint: path of the newest checkpoint; None if there is none.
        """
        if self.has_ended:
            return
        self._has_reported = True
        values = {**metrics, "step": step}
        try:
            if checkpoint is None or checkpoint == self._reported:
                tune.report(values)
                return
            self._reported = checkpoint
            with tempfile.TemporaryDirectory(prefix="headway-pointer-") as folder:
                write_pointer(Pointer(run_dir=self._run_dir, checkpoint=checkpoint), folder)
                tune.report(values, checkpoint=tune.Checkpoint.from_directory(folder))
        except SystemExit:
            # Raised by Ray Tune inside the report, when it ends or pauses the trial.
            self.has_ended = True

    def finish(self, result: Mapping[str, Any]) -> None:
        """Report the end of a run that has reported nothing, or whose last checkpoint Ray Tune does not know.

        Args:
            result: the fields of `RunResult`.
        """
        if result["metrics"] and (not self._has_reported or result["last_checkpoint"] != self._reported):
            self.report(result["metrics"], result["steps"], result["last_checkpoint"])


class EvaluationCallback(Callback):
    """Saves a checkpoint at each evaluation of a trial in this process, and reports both.

    Args:
        reporter: of the trial.
    """

    def __init__(self, reporter: TuneReporter) -> None:
        self._reporter = reporter
        self._metrics: dict[str, float] = {}
        # Evaluations that wait for their checkpoint, with their step.
        self._evaluated: list[tuple[int, dict[str, float]]] = []

    def on_log(self, trainer: Trainer[Any], metrics: Mapping[str, float]) -> None:
        """Keep the metrics of the training, which are reported with the next evaluation."""
        self._metrics.update(metrics)

    def on_evaluation_end(self, trainer: Trainer[Any], metrics: Mapping[str, float]) -> None:
        """Request the checkpoint to report with the evaluation."""
        self._reporter.check(metrics)
        self._metrics.update(metrics)
        self._evaluated.append((trainer.global_step, dict(self._metrics)))
        trainer.request_save()

    def on_checkpoint_saved(self, trainer: Trainer[Any], checkpoint: Any) -> None:
        """Report the evaluations up to this checkpoint."""
        while self._evaluated and self._evaluated[0][0] <= checkpoint.step:
            step, metrics = self._evaluated.pop(0)
            self._reporter.report(metrics, step, str(checkpoint.path))
        if self._reporter.has_ended:
            trainer.request_stop(ENDED_BY_TUNE, status="interrupted")


def _drive(start: Start, experiment: Experiment, reporter: TuneReporter) -> RunResult:
    """Drive the run of a trial with several workers, as `fit` does."""
    opened = open_run(experiment, accept_changes=True, take_over=True, provenance=start.provenance)
    run, display = opened.run, _EventConsole(reporter, opened.run)
    if opened.state == "finished":
        return finished_result(run, display)
    try:
        # The trial may have to wait for other trials to end.
        result = RunDriver(
            experiment, run, StopSignals(), display, resume_options=start.resume_options, verbose=False, spares=False,
            enforce_wait=False,
        ).run()  # fmt: skip
        close(run, result, display)
    except BaseException as error:
        with contextlib.suppress(StorageError):
            run.update(status="failed", reason="", error=summarize_error(error), ended=now())
            write_driver_ended(run, "failed")
        raise
    finally:
        run.release()
    return result


class _EventConsole(RunConsole):
    """Reports a run's evaluations from its events, and stops the run when Ray Tune ends the trial. Prints nothing."""

    def __init__(self, reporter: TuneReporter, run: Run) -> None:
        super().__init__(Console(quiet=True))
        self._reporter, self._of_run = reporter, run
        self._checkpoint: str | None = None

    def event(self, event: Event) -> None:
        """Report an evaluation, with the newest checkpoint."""
        if event["event"] == "checkpoint_saved":
            self._checkpoint = event["path"]
        elif event["event"] == "evaluated":
            self._reporter.check(event["metrics"])
            self._reporter.report(event["metrics"], event["step"], self._checkpoint)
            if self._reporter.has_ended:
                request_stop(self._of_run.folder, StopRequest(reason=ENDED_BY_TUNE, status="interrupted"))
