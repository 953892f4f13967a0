"""The worker group of one start of a run: the call of Ray Train, its arguments, and the error for a failure."""

from __future__ import annotations

import math
import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray import cloudpickle

from headway.trainer.distributed.world import backend
from headway.trainer.errors import ConfigError

from ..cluster.ray_env import temporary_env
from ..config.experiment import Experiment
from ..config.target import is_user_file
from ..errors import TrainingFailedError
from ..runs.resume import ResumeOptions
from ..runs.run import Run
from ..storage.events import read_events
from ..storage.scratch import scratch_folder
from .elastic import RAY_LEARNS_S
from .failures import RetriesExhausted, RetryPolicy, last_failure
from .standby import environment
from .worker import Task, train
from .worker_check import driver_versions

_START_TIMEOUT = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
# Ray Train also counts restarts to resize and lost peers of a preempted machine; `RetryPolicy` keeps the budgets.
_MOST_ATTEMPTS = 10_000


def run_worker_group(
    experiment: Experiment,
    run: Run,
    *,
    resume_options: ResumeOptions,
    wait_timeout_s: float,
    verbose: bool,
    spares: bool,
) -> dict[str, Any]:
    """Run Ray Train to its end, and return the fields of rank 0's `FitResult`.

    Ray's own files go to a temporary folder: with the same name and storage Ray Train would resume by itself.
    """
    # Imported here, because it takes 0.1 s and a trial of one worker does not need it.
    from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    scaling, retries = experiment.scaling, experiment.retries
    task = make_task(experiment, run, resume_options=resume_options, verbose=verbose)
    # If machines go while an elastic group starts, it is soon sized again.
    start_timeout_s = math.ceil(RAY_LEARNS_S) if scaling.is_elastic else 60
    with scratch_folder() as ray_dir:
        trainer = TorchTrainer(
            train,
            train_loop_config={"task": task, "training": pickle_trainer(experiment)},
            torch_config=TorchConfig(
                backend=backend(
                    "cuda" if scaling.gpus_per_worker else "cpu", with_cpus=experiment.config.parallel.cpu_offload
                ),
                timeout_s=math.ceil(experiment.config.parallel.timeout.amount),
            ),
            scaling_config=ScalingConfig(
                num_workers=scaling.workers,
                # Ray Train would end the group in the middle of an update; see elastic.py.
                elastic_resize_monitor_interval_s=math.inf,
                use_gpu=scaling.gpus_per_worker > 0,
                resources_per_worker=scaling.worker_resources,
            ),
            run_config=RunConfig(
                name=f"{experiment.name}-{run.record.id}",
                storage_path=ray_dir,
                worker_runtime_env=environment(task.threads) if spares else {},
                failure_config=FailureConfig(
                    max_failures=_MOST_ATTEMPTS,
                    # Ray Train reports an attempt that it ends at a deadline to no callback, so this is its budget.
                    max_preemption_failures=-1 if retries.max_preemptions is None else retries.max_preemptions,
                    # Failed starts of a group: each waits for machines for the start timeout.
                    controller_failure_limit=retries.max_failures + math.ceil(wait_timeout_s / start_timeout_s),
                ),
                callbacks=[retry_policy(experiment, run)],
                logging_config=LoggingConfig(log_level="INFO" if verbose else "ERROR"),
            ),
        )
        with temporary_env({_START_TIMEOUT: str(start_timeout_s)}, unless_set=True):
            returned: dict[str, Any] = trainer.fit().return_value
        return returned


def retry_policy(experiment: Experiment, run: Run) -> RetryPolicy:
    """Return the retry policy of one start of a run."""
    retries = experiment.retries
    return RetryPolicy(
        run.run_dir, start=run.lease, max_failures=retries.max_failures, max_errors=retries.max_errors,
        max_preemptions=retries.max_preemptions,
    )  # fmt: skip


def make_task(experiment: Experiment, run: Run, *, resume_options: ResumeOptions, verbose: bool) -> Task:
    """Return the settings for each worker of a run."""
    scaling = experiment.scaling
    return Task(
        run_dir=run.run_dir,
        resume_options=resume_options,
        imports=import_folders(),
        current_dir=os.getcwd(),
        threads=max(1, int(scaling.cpus_per_worker)),
        on_cpu=not scaling.gpus_per_worker,
        lease=run.lease,
        driver_host=run.record.driver.host,
        versions=driver_versions(),
        polls_preemption=os.environ.get("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "1").lower() in ("1", "true"),
        monitors_hangs=experiment.retries.hang_timeout is not None,
        capture_output=not verbose,
        max_workers=scaling.max_workers,
        timeout_s=experiment.config.parallel.timeout.amount,
        evaluates_elsewhere=scaling.evaluation_worker is not None,
    )


def pickle_trainer(experiment: Experiment) -> bytes:
    """Return the pickled class and config of the trainer; definitions from a user's file travel by value."""
    with pickling_by_value(experiment):
        try:
            pickled: bytes = cloudpickle.dumps((experiment.trainer, experiment.config))
        except Exception as error:
            raise ConfigError(
                f"{experiment.trainer.__name__} cannot be pickled for the workers ({type(error).__name__}: {error}): "
                "create objects that cannot be pickled in a method of the trainer, not at the top of its file"
            ) from error
    return pickled


@contextmanager
def pickling_by_value(experiment: Experiment) -> Iterator[None]:
    """Pickle definitions from a user's file by value inside this context: workers cannot import the file."""
    names = {each.__module__ for each in (*experiment.trainer.__mro__, *type(experiment.config).__mro__)}
    modules = [module for name in names if is_user_file(module := sys.modules.get(name)) and module is not None]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def import_folders() -> tuple[str, ...]:
    """Return the folders that this process imports from, besides installed packages."""
    installed = {os.path.realpath(path) for path in sysconfig.get_paths().values()}
    folders = (os.path.realpath(path or os.getcwd()) for path in sys.path)
    return tuple(
        folder for folder in folders
        if os.path.isdir(folder) and folder not in installed and os.path.dirname(folder) not in installed
    )  # fmt: skip


def training_error(error: BaseException, run: Run) -> BaseException:
    """Return the error to raise for one of Ray's: the exception of the worker that failed first, or that it died."""
    failures: dict[int, BaseException] = getattr(error, "worker_failures", None) or {}
    events = [event for event in read_events(run.folder) if event.get("start") == run.lease]
    failure = last_failure(events, {rank: "" for rank in failures})
    gave_up = error if isinstance(error, RetriesExhausted) else getattr(error, "controller_failure", None)
    if failure is None:
        # A worker that failed its first check has written no event.
        refused = gave_up.raised if isinstance(gave_up, RetriesExhausted) else None
        if isinstance(refused, ConfigError):
            return refused
        unknown = TrainingFailedError(f"training failed: {type(error).__name__}: {error}")
        unknown.__cause__ = error
        return unknown
    before = [event["text"] for event in events if event["event"] == "group_failed"]
    text = str(gave_up.args[0] if isinstance(gave_up, RetriesExhausted) else failure)
    first = f"; the first of {len(before)} failures: {before[0]}" if before and before[0] != text else ""
    failed = TrainingFailedError(
        f"{text} (attempt {failure.attempt}){first}", rank=failure.rank, attempt=failure.attempt, step=failure.step,
        worker_traceback=failure.traceback,
    )  # fmt: skip
    raised = failures.get(failure.rank) if failure.rank is not None else None
    raised = raised or getattr(gave_up, "raised", None)
    # By module: the errors of headway.datasets have no base class in common with the trainer's.
    if isinstance(raised, Exception) and type(raised).__module__.startswith("headway."):
        return raised
    failed.__cause__ = raised
    return failed
