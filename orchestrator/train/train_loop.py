"""`train_loop(experiment)`: the function that a `TorchTrainer` of the user's runs in each of its workers.

It makes the attempt that `fit` makes in its workers (worker.py). Here the main rank opens the run and keeps its record,
which otherwise the driver does, and evaluations and checkpoints are reported to Ray Train.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from headway.trainer.callbacks.base import Callback
from headway.trainer.distributed.world import World
from headway.trainer.loop.run_state import COMPONENTS
from headway.trainer.trainer import Trainer

from ..config.experiment import Experiment
from ..config.loader import check_experiment, check_not_redacted
from ..config.scaling import Scaling
from ..config.script_settings import unpickle_with_settings
from ..config.values import with_values
from ..display.console import RunConsole
from ..runs.open import OpenedRun, open_run, provenance_of
from ..runs.pointer import Pointer
from ..runs.result import RunResult
from ..runs.resume import ResumeOptions
from ..runs.run import HEARTBEAT_S, Run
from ..storage.events import EventWriter, read_events
from ..storage.folder import Folder, retry_storage
from .fit import close, finished_result, keep_error, record_failure
from .ray_train_thread import RayTrainThread, replace_ray_calls
from .worker import Task, enter_driver_folders, has_accelerator, run_attempt
from .worker_check import driver_versions
from .worker_group import import_folders, pickle_experiment, polls_preemption


@dataclass(frozen=True, kw_only=True)
class Start:
    """What the process that calls `train_loop` or `trainable` passes to the workers.

    Attributes:
        id: unique for each call, so that a group of workers knows the one that it replaces.
        experiment: pickled; classes from a user's file are pickled by value.
        resume_options: what to resume from.
        imports, current_dir, host, versions: of the calling process, as in `Task`.
        provenance: the output of `provenance_of`.
    """

    id: str
    experiment: bytes
    resume_options: ResumeOptions
    imports: tuple[str, ...]
    current_dir: str
    host: str
    versions: dict[str, str]
    provenance: dict[str, Any]

    @classmethod
    def of(cls, experiment: Experiment, resume_options: ResumeOptions) -> Start:
        """Return the start of an experiment from this process.

        Raises:
            ConfigError: the experiment comes from a record without its secrets, or cannot be pickled.
        """
        check_experiment(experiment)
        check_not_redacted(experiment)
        return cls(
            id=uuid.uuid4().hex, experiment=pickle_experiment(experiment), resume_options=resume_options,
            imports=import_folders(), current_dir=os.getcwd(), host=socket.gethostname(), versions=driver_versions(),
            provenance=provenance_of(experiment),
        )  # fmt: skip

    def enter(self, values: Mapping[str, Any]) -> Experiment:
        """Prepare this process to import what the calling process imports, and return the experiment.

        Args:
            values: other values at dotted paths.

        Raises:
            ConfigError: a path or a value is invalid.
        """
        enter_driver_folders(self.current_dir, self.imports)
        replace_ray_calls()
        experiment: Experiment = with_values(unpickle_with_settings(self.experiment), values)
        return experiment


def train_loop(
    experiment: Experiment,
    *,
    resume: Literal["auto", "never"] | str = "auto",
    restore: Collection[str] = COMPONENTS,
    accept_changes: bool = False,
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the function for a `TorchTrainer`, which trains the experiment, or resumes it, on Ray Train's workers.

    The run is in the experiment's folder, with the files that `fit` writes. Each evaluation and each checkpoint is
    reported to Ray Train; its `Checkpoint` is a pointer, of which `checkpoint_path` gives the checkpoint. `scaling` and
    `retries` of the experiment do not apply: `ScalingConfig` and `FailureConfig` do. What `fit` does besides is listed
    in docs/ray.md. `Result.return_value` has the fields of `RunResult`.

    `TorchTrainer(train_loop_config=...)` may give other values, by dotted path: `{"config.learning_rate": 1e-3}`.

    Args:
        experiment: what to train.
        resume: as for `fit`; a group of workers that replaces a failed one resumes from what the run has saved.
        restore: as for `fit`.
        accept_changes: as for `fit`.

    Raises:
        ConfigError: the arguments are invalid, or the trainer cannot be pickled.

    Example:
        >>> from ray.train import ScalingConfig
        >>> from ray.train.torch import TorchTrainer
        >>> experiment = Experiment(name="digits", trainer=Digits, config=config)
        >>> trainer = TorchTrainer(train_loop(experiment), scaling_config=ScalingConfig(num_workers=8, use_gpu=True))
        >>> # result = trainer.fit()
    """
    start = Start.of(experiment, ResumeOptions.checked(resume, restore, accept_changes=accept_changes))

    # Ray Train passes its config only to a function that requires one; without `train_loop_config` it is empty.
    def train_experiment(config: dict[str, Any]) -> dict[str, Any]:
        return train_rank(start, start.enter(config), on_cpu=not has_accelerator(), reports=True)

    return train_experiment


def train_rank(
    start: Start,
    experiment: Experiment,
    *,
    on_cpu: bool,
    reports: bool,
    callbacks: Sequence[Callback] = (),
    take_over: bool = False,
) -> dict[str, Any]:
    """Train one attempt on this rank; the main rank returns the fields of `RunResult`. Every rank must call this.

    Args:
        start: of the process that created the function.
        experiment: what to train.
        on_cpu: whether Ray has given this worker no accelerator.
        reports: whether Ray Train runs this worker, and receives reports.
        callbacks: further callbacks of the trainer.
        take_over: also take the run from a live process.

    Raises:
        RunConflictError: the run has another config, or belongs to another process.
        Exception: whatever the trainer raises.
    """
    timeout_s = experiment.config.parallel.timeout.amount
    world = World.attach("cpu" if on_cpu else None, timeout_s=timeout_s)
    scaling = Scaling(workers=world.size, gpus_per_worker=0 if on_cpu else 1)
    experiment = replace(experiment, scaling=scaling)
    opened: OpenedRun | None = None
    error: Exception | None = None
    if world.is_main:
        try:
            opened = _open(start, experiment, take_over=take_over)
        except Exception as caught:
            error = caught
    found = world.broadcast((opened.state, opened.run.lease) if opened is not None else error)
    if isinstance(found, Exception):
        raise found
    assert found is not None
    state, lease = found
    if state == "finished":
        return _finished(opened, reports=reports)
    task = Task(
        run_dir=experiment.run_dir, resume_options=start.resume_options, imports=start.imports,
        current_dir=start.current_dir, threads=None, on_cpu=on_cpu, lease=lease, driver_host=start.host,
        versions=start.versions, polls_preemption=reports and polls_preemption(), monitors_hangs=False,
        capture_output=False, max_workers=world.size, timeout_s=timeout_s, evaluates_elsewhere=False, reports=reports,
    )  # fmt: skip

    def attempt(*more: Callback) -> dict[str, Any]:
        return run_attempt(task, lambda: (experiment.trainer, experiment.config), [*more, *callbacks])

    if opened is None:
        return attempt()
    with _kept_record(opened.run) as keeper:
        returned = attempt(keeper)
    result = RunResult.returned(opened.run, returned)
    close(opened.run, result, RunConsole())
    opened.run.release()
    return asdict(result)


def _open(start: Start, experiment: Experiment, *, take_over: bool) -> OpenedRun:
    """Open the run. A group of workers takes it from the group that it replaces, which Ray Train has ended."""
    events = retry_storage(lambda: read_events(Folder(experiment.run_dir)))
    starts = [event for event in events if event["event"] == "driver_started"]
    replaces = bool(starts) and starts[-1].get("call") == start.id
    opened = open_run(
        experiment, accept_changes=start.resume_options.accept_changes, take_over=take_over or replaces,
        provenance=start.provenance, say=print,
    )  # fmt: skip
    if opened.state != "finished":
        EventWriter(opened.run.folder, "driver", start=opened.run.lease).add(
            "driver_started", pid=os.getpid(), workers=experiment.scaling.workers, call=start.id,
            **start.resume_options.explicit,
        )  # fmt: skip
    return opened


def _finished(opened: OpenedRun | None, *, reports: bool) -> dict[str, Any]:
    """Return the result of a finished run. Ray Train receives it again, because this may be another `TorchTrainer`."""
    metrics: dict[str, Any] = {}
    result: RunResult | None = None
    pointer: Pointer | None = None
    if opened is not None:
        result = finished_result(opened.run, RunConsole())
        metrics = {**result.metrics, "step": result.steps}
        if result.last_checkpoint is not None:
            pointer = Pointer(run_dir=result.run_dir, checkpoint=result.last_checkpoint)
    if reports:
        thread = RayTrainThread(is_main=opened is not None, on_notice=None, reports=True)
        thread.report(metrics, pointer)
        thread.end(wait=True)
    return asdict(result) if result is not None else {}


@contextlib.contextmanager
def _kept_record(run: Run) -> Iterator[_RecordKeeper]:
    """Keep the record of a run up to date while this process trains it; record a failure."""
    keeper = _RecordKeeper(run)
    try:
        yield keeper
    except BaseException as error:
        keeper.close()
        with keep_error(error):
            record_failure(run, error)
        run.release()
        raise
    keeper.close()


class _RecordKeeper(Callback):
    """Writes progress and heartbeats of a run without a driver into its record; heartbeats in a thread."""

    def __init__(self, run: Run) -> None:
        self._run, self._lock, self._ended = run, threading.Lock(), threading.Event()
        self._metrics = dict(run.record.metrics)
        self._thread = threading.Thread(target=self._beat, name="headway-record", daemon=True)
        self._thread.start()

    def on_fit_start(self, trainer: Trainer[Any]) -> None:
        """Record the attempt and the data."""
        self._update(attempts=trainer.attempt, workers=trainer.world.size, data=trainer.data_identity)

    def on_evaluation_end(self, trainer: Trainer[Any], metrics: Mapping[str, float]) -> None:
        """Keep the metrics for the record."""
        self._metrics.update(metrics)

    def on_checkpoint_saved(self, trainer: Trainer[Any], checkpoint: Any) -> None:
        """Record it: the record stays true if this process dies, as it may when Ray Tune ends a trial."""
        self._update(steps=checkpoint.step, last_checkpoint=str(checkpoint.path), metrics=self._metrics)

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def _update(self, **changes: Any) -> None:
        with self._lock:
            retry_storage(lambda: self._run.update(**changes))

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_S):
            # A lost run is noticed by `RunCallback`, and a storage that is away costs heartbeats only.
            with contextlib.suppress(Exception), self._lock:
                self._run.beat()
