"""`fit(experiment)`: one run on Ray Train, from the claim on its folder to its last word."""

from __future__ import annotations

import math
import os
import shutil
import signal
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from headway.trainer.callbacks.progress_bar import human_duration
from headway.trainer.errors import ConfigError, HeadwayError
from headway.trainer.result import Status

from .display import Display
from .errors import TrainingFailedError
from .events import EventLog, Follower, read_events
from .experiment import Experiment
from .quiet import quiet_environment
from .runs import Opened, Run, now, open_run
from .storage import absolute
from .target import travels_by_value

# A group that has not come up after so long, on a cluster that could hold it, is given up; Scaling.wait says otherwise.
_PATIENCE_S = 600.0


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended, as far as it has come over all its attempts.

    Attributes:
        status: "completed", "stopped", "time_limit" or "interrupted". A failure is raised.
        reason: why, in words.
        metrics: the last value of every metric.
        history: one dict per completed epoch.
        steps, epochs: how far it is.
        attempts: lives of worker groups so far.
        run_dir: where its files lie.
        last_checkpoint, best_checkpoint: paths in it.
        resumed_from: the checkpoint that the last attempt began from.
        signal: the number of the signal that interrupted it, if one did.
    """

    status: Status
    reason: str
    run_dir: str
    metrics: dict[str, float] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)
    steps: int = 0
    epochs: int = 0
    attempts: int = 0
    last_checkpoint: str | None = None
    best_checkpoint: str | None = None
    resumed_from: str | None = None
    signal: int | None = None


def fit(
    experiment: Experiment,
    *,
    resume: str = "auto",
    accept_changes: bool = False,
    verbose: bool = False,
    display: Display | None = None,
) -> RunResult:
    """Trains an experiment with its workers, or goes on with it, and shows it while it trains.

    Uses the Ray that this process is connected to, else that of RAY_ADDRESS, else starts a quiet one for the time of the run.
    In the main thread, the first SIGINT or SIGTERM saves a checkpoint and ends the run as "interrupted"; the second one
    ends it at once.

    Args:
        experiment: what to train.
        resume: "auto" goes on from the newest good checkpoint of the run; a path begins from that checkpoint.
        accept_changes: goes on although the config is not the one that the run was begun with.
        verbose: shows what Ray and the workers print.
        display: where to show the run; by default on standard output.

    Raises:
        ConfigError: what was asked for makes no sense, or there are not the machines for it. Before Ray starts, if it can be.
        RunConflictError: the run of this name is another one.
        StorageError: the storage cannot be written.
        HeadwayError: an error of Headway in a worker (DataError, StepError, ...), as it was raised.
        TrainingFailedError: any other error in a worker, with its traceback, or more failures than retries.
    """
    quiet_environment(verbose=verbose)
    from .local_ray import check_machine, connected, missing, will_be_own

    display = display or Display()
    if resume != "auto":
        resume = _existing_checkpoint(resume)
    if will_be_own():
        check_machine(experiment.scaling)
    opened = open_run(experiment, accept_changes=accept_changes)
    if opened.verdict == "finished":
        return _finished(opened.run, display)
    run = opened.run
    _greet(opened, experiment, display)
    with _Signals() as signals:
        try:
            with connected(experiment.scaling, verbose=verbose):
                # ray.init takes SIGTERM for itself.
                signals.install()
                if experiment.scaling.wait is None and (lack := missing(experiment.scaling)):
                    raise ConfigError(
                        f"the cluster has {lack} that {experiment.scaling.workers} workers want: lower scaling.workers, or say "
                        "how long to wait for more machines, as in scaling.wait=10m"
                    )
                result = _Supervision(experiment, run, signals, display, resume=resume, verbose=verbose).run()
        except KeyboardInterrupt:
            result = RunResult(
                status="interrupted", reason=f"{signals.name} before training began", run_dir=run.run_dir,
                steps=run.record.steps, epochs=run.record.epochs, signal=signals.number,
            )  # fmt: skip
            _close(run, result, display)
        except BaseException as error:
            display.close()
            run.update(status="failed", reason="", error=_one_line(error), ended=now())
            raise
    return result


class _Signals:
    """Counts SIGINT and SIGTERM, in the main thread; elsewhere signals go where they went before."""

    def __init__(self) -> None:
        self.count = 0
        self.number: int | None = None
        self.raises = True
        self._before: dict[int, Any] = {}

    @property
    def name(self) -> str:
        return {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}.get(signal.Signals(self.number or signal.SIGINT), "a signal")

    def __enter__(self) -> _Signals:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def install(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                before = signal.signal(number, self._on_signal)
                self._before.setdefault(number, before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.number = self.number or number
        if self.raises:
            raise KeyboardInterrupt


class _Supervision:
    """Ray Train in a thread, and beside it one that watches the run's files, the signals and the clock."""

    def __init__(
        self, experiment: Experiment, run: Run, signals: _Signals, display: Display, *, resume: str, verbose: bool
    ) -> None:
        self._experiment, self._run, self._signals, self._display = experiment, run, signals, display
        self._resume, self._verbose = resume, verbose
        self._since = time.time()
        self._returned: dict[str, Any] | None = None
        self._error: BaseException | None = None
        self._is_up = False
        self._asked = 0
        self._events = EventLog(run.folder, "driver")
        self._event_lines = Follower(run.folder, "events", from_now=True)
        self._metric_lines = Follower(run.folder, "metrics.jsonl", from_now=True)

    def run(self) -> RunResult:
        """Trains to the end, whatever it is."""
        from .bridge import withdraw_stop

        withdraw_stop(self._run.folder)
        self._events.add("driver_started", pid=os.getpid(), workers=self._experiment.scaling.workers)
        thread = threading.Thread(target=self._train, name="headway-ray-train", daemon=True)
        self._signals.raises = False
        thread.start()
        pause_s = 0.1 if self._run.folder.is_local else 2.0
        try:
            while thread.is_alive():
                thread.join(pause_s)
                self._look()
                if self._heed_signals():
                    return self._abandoned()
                self._heed_the_clock()
            self._look()
        finally:
            self._display.close()
        result = self._result()
        _close(self._run, result, self._display)
        return result

    def _train(self) -> None:
        try:
            self._returned = _ray_train(self._experiment, self._run, since=self._since, resume=self._resume, verbose=self._verbose)
        except BaseException as error:
            self._error = error

    def _look(self) -> None:
        """Shows what is new, and takes it into the record."""
        for event in self._event_lines.read():
            self._display.event(event)
            if event["event"] == "attempt_started":
                self._is_up = True
                self._run.update(attempts=event["attempt"], workers=event["world_size"])
        for record in self._metric_lines.read():
            self._display.record(record)
        self._run.beat()

    def _heed_signals(self) -> bool:
        """Whether to leave at once. The first signal asks the workers to save and end, if there are any."""
        from .bridge import request_stop

        if self._signals.count == self._asked:
            return False
        self._asked = self._signals.count
        leave = not self._is_up or self._asked > 1
        request_stop(self._run.folder, self._signals.name, status="interrupted", abort=leave)
        if not leave:
            self._display.line(f"{self._signals.name}: saving a checkpoint and ending; once more to end at once")
        return leave

    def _abandoned(self) -> RunResult:
        reason = f"{self._signals.name}, at once" if self._is_up else f"{self._signals.name} before training began"
        self._display.close()
        result = RunResult(
            status="interrupted", reason=reason, run_dir=self._run.run_dir, attempts=self._run.record.attempts,
            steps=self._run.record.steps, epochs=self._run.record.epochs, signal=self._signals.number,
        )  # fmt: skip
        _close(self._run, result, self._display)
        return result

    def _heed_the_clock(self) -> None:
        """Does not wait for ever for workers that do not come."""
        from .local_ray import missing

        wait = self._experiment.scaling.wait
        patience_s = wait.amount if wait else _PATIENCE_S
        if self._is_up or time.time() - self._since < patience_s:
            return
        lack = missing(self._experiment.scaling)
        raise ConfigError(
            f"the workers have not come up in {human_duration(patience_s)}: "
            + (f"the cluster has {lack}" if lack else "the cluster could hold them, and is busy with something else")
            + "; to wait longer, set scaling.wait"
        )

    def _result(self) -> RunResult:
        if self._error is not None:
            raise _as_ours(self._error, self._run, self._since)
        returned = self._returned or {}
        return RunResult(
            **returned,
            run_dir=self._run.run_dir,
            attempts=self._run.record.attempts,
            signal=self._signals.number if returned.get("status") == "interrupted" else None,
        )


def _ray_train(experiment: Experiment, run: Run, *, since: float, resume: str, verbose: bool) -> dict[str, Any]:
    """Runs Ray Train to its end, and returns what rank 0 did. Ray's own files go to a folder of this start and nowhere else.

    The same name and storage would make Ray Train resume by itself, from what it thinks was last.
    """
    from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from .failures import FailureWatch
    from .worker import Task, train

    scaling, retries = experiment.scaling, experiment.retries
    task = Task(
        training=_pickled(experiment),
        run_dir=run.run_dir,
        since=since,
        resume=resume,
        imports=_import_folders(),
        current_dir=os.getcwd(),
        threads=max(1, int(scaling.cpus_per_worker)),
        on_cpu=not scaling.gpus_per_worker,
        capture=not verbose,
    )
    rays_files = tempfile.mkdtemp(prefix="headway-ray-")
    patience_s = scaling.wait.amount if scaling.wait else _PATIENCE_S
    try:
        trainer = TorchTrainer(
            train,
            train_loop_config={"task": task},
            torch_config=TorchConfig(backend="nccl" if scaling.gpus_per_worker else "gloo"),
            scaling_config=ScalingConfig(
                num_workers=scaling.workers, use_gpu=scaling.gpus_per_worker > 0, resources_per_worker=scaling.per_worker
            ),
            run_config=RunConfig(
                name=f"{experiment.name}-{run.record.id}",
                storage_path=rays_files,
                failure_config=FailureConfig(
                    max_failures=retries.max_failures,
                    max_preemption_failures=-1 if retries.max_preemptions is None else retries.max_preemptions,
                    # Of starting a group: Ray Train waits 60 s for machines each time.
                    controller_failure_limit=retries.max_failures + math.ceil(patience_s / 60),
                ),
                callbacks=[FailureWatch(run.run_dir)],
                logging_config=LoggingConfig(log_level="INFO" if verbose else "ERROR"),
            ),
        )
        returned: dict[str, Any] = trainer.fit().return_value
        return returned
    finally:
        shutil.rmtree(rays_files, ignore_errors=True)


def _pickled(experiment: Experiment) -> bytes:
    """The trainer's class and config as bytes. What a user's file defines goes with them: workers cannot import it."""
    from ray import cloudpickle

    with _by_value(experiment):
        try:
            pickled: bytes = cloudpickle.dumps((experiment.trainer, experiment.config))
        except Exception as error:
            raise ConfigError(
                f"{experiment.trainer.__name__} cannot be sent to workers ({type(error).__name__}: {error}): make what cannot be "
                "pickled inside a method of the trainer, not at the top of its file"
            ) from error
    return pickled


@contextmanager
def _by_value(experiment: Experiment) -> Iterator[None]:
    from ray import cloudpickle

    names = {each.__module__ for each in (*experiment.trainer.__mro__, *type(experiment.config).__mro__)}
    modules = [module for name in names if travels_by_value(module := sys.modules.get(name)) and module is not None]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _import_folders() -> tuple[str, ...]:
    """Where this process imports from, apart from what is installed."""
    installed = {os.path.realpath(path) for path in sysconfig.get_paths().values()}
    folders = (os.path.realpath(path or os.getcwd()) for path in sys.path)
    return tuple(
        folder for folder in folders
        if os.path.isdir(folder) and folder not in installed and os.path.dirname(folder) not in installed
    )  # fmt: skip


def _existing_checkpoint(path: str) -> str:
    from headway.trainer.checkpoint import read_checkpoint

    place = absolute(path)
    read_checkpoint(place)
    return place


def _as_ours(error: BaseException, run: Run, since: float) -> BaseException:
    """The error to raise for one of Ray's: what the first worker to fail had raised, or that it died."""
    from .failures import last_failure

    failures: dict[int, BaseException] = getattr(error, "worker_failures", None) or {}
    events = [event for event in read_events(run.folder) if event["time"] >= since]
    failure = last_failure(events, {rank: "" for rank in failures})
    if failure is None:
        return TrainingFailedError(f"training failed: {_one_line(error)}").with_traceback(None)
    failed = TrainingFailedError(
        f"{failure} (attempt {failure.attempt})", rank=failure.rank, attempt=failure.attempt, step=failure.step,
        worker_traceback=failure.traceback,
    )  # fmt: skip
    raised = failures.get(failure.rank) if failure.rank is not None else None
    raised = raised or getattr(getattr(error, "controller_failure", None), "raised", None)
    if isinstance(raised, HeadwayError):
        return raised
    failed.__cause__ = raised
    return failed


def _finished(run: Run, display: Display) -> RunResult:
    record = run.record
    display.line(
        f"{record.name} is finished: {record.status} after {record.steps:,} steps ({record.reason}). Its files: {run.run_dir}"
    )
    display.line(
        "To train on, raise its limit: config.max_steps=... or config.max_epochs=...; to train anew, give it another name: name=..."
    )
    assert record.status in ("completed", "stopped")
    return RunResult(
        status=record.status, reason=record.reason, run_dir=run.run_dir, metrics=record.metrics, steps=record.steps,
        epochs=record.epochs, attempts=record.attempts, last_checkpoint=record.last_checkpoint,
    )  # fmt: skip


def _greet(opened: Opened, experiment: Experiment, display: Display) -> None:
    count = experiment.scaling.workers
    display.line(f"{experiment.name}: {count} worker{'s'[: count > 1]}, {opened.verdict}; its files: {experiment.run_dir}")
    for change in opened.changes:
        display.line(f"  {change.path}: {change.before} -> {change.after}", "dim")


def _close(run: Run, result: RunResult, display: Display) -> None:
    run.update(
        status=result.status, reason=result.reason, ended=now(), steps=result.steps, epochs=result.epochs,
        metrics=result.metrics, last_checkpoint=result.last_checkpoint or run.record.last_checkpoint,
    )  # fmt: skip
    numbers = "  ".join(f"{name} {value:.4g}" for name, value in result.metrics.items() if "loss" in name)
    display.line(f"{result.status} after {result.steps:,} steps: {result.reason}" + (f"  ({numbers})" if numbers else ""), "bold")
    display.line(f"its files: {result.run_dir}")
    if result.status in ("interrupted", "time_limit"):
        display.line("to go on, start it again as before")


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"

