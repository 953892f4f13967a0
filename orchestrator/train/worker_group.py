"""The worker group of one start of a run: the call of Ray Train, its arguments, and the error for a failure."""

from __future__ import annotations

import copyreg
import importlib
import math
import os
import re
import sys
import sysconfig
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeGuard

from ray import cloudpickle
from ray.exceptions import OutOfMemoryError, RayActorError, RaySystemError, RayTaskError

from headway.trainer.callbacks.base import Callback
from headway.trainer.distributed.world import backend_for
from headway.trainer.errors import ConfigError

from ..cluster.own_ray import is_on_loopback
from ..cluster.ray_env import temporary_env
from ..config.experiment import RAYS_BACKENDS, Experiment
from ..config.scaling import Scaling
from ..config.script_settings import pickle_with_settings
from ..config.target import is_user_file
from ..errors import TrainingFailedError
from ..runs.requests import StopRequest, read_stop_request
from ..runs.resume import ResumeOptions
from ..runs.run import Run
from ..storage.events import read_events
from ..storage.folder import Folder, retry_storage
from ..storage.scratch import scratch_folder
from .elastic import RAY_LEARNS_S, RESIZING, is_sized_by_driver
from .failures.cause import find_cause, raised_failure
from .failures.retry_policy import Restart, RestartRequired, RetriesExhausted, RetryPolicy, failure_of, slots_beside
from .standby import environment, prestart
from .worker import Task
from .worker_check import driver_versions

_START_TIMEOUT = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
# Ray's class is private. If it is renamed, a group that was sized with a lost node ends the run.
_START_TIMED_OUT = "WorkerGroupStartupTimeoutError"
# A second limit, should Ray suppress the exceptions by which `RetryPolicy` ends retries. Ray Train also counts restarts
# to resize and lost peers of a preempted machine; if the policy allows more, the driver starts Ray Train again.
_MOST_RAY_RETRIES = 20


def run_worker_group(
    experiment: Experiment,
    run: Run,
    *,
    resume_options: ResumeOptions,
    wait_timeout_s: float,
    verbose: bool,
    spares: bool,
    mailbox: Any = None,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Run Ray Train to its end, and return the fields of rank 0's `FitResult`.

    Starts Ray Train again if the workers are to restart later or on other nodes.
    """
    avoided: frozenset[str] = frozenset()
    is_first = True
    while True:
        try:
            return _run_ray_train(
                experiment, run, resume_options=resume_options, wait_timeout_s=wait_timeout_s, verbose=verbose,
                spares=spares, mailbox=mailbox, callbacks=callbacks, avoided=avoided, is_first=is_first,
            )  # fmt: skip
        except Exception as error:
            restart = _restart_after(error, run, avoided, experiment.scaling)
            if restart is None:
                raise
        if (stop := wait_to_restart(run.folder, restart.delay_s)) is not None:
            return {"status": stop.status, "reason": stop.reason}
        avoided, is_first = restart.avoid, False


def wait_to_restart(folder: Folder, delay_s: float) -> StopRequest | None:
    """Wait until workers may restart; returns a request to stop at once."""
    until_s = time.monotonic() + delay_s
    while (stop := retry_storage(lambda: read_stop_request(folder))) is None and time.monotonic() < until_s:
        time.sleep(min(0.3 if folder.is_local else 3.0, max(0.0, until_s - time.monotonic())))
    return stop


def _restart_after(error: BaseException, run: Run, avoided: frozenset[str], scaling: Scaling) -> Restart | None:
    """Return how the workers restart after Ray Train has ended; None if they do not."""
    ended = getattr(error, "controller_failure", None)
    if isinstance(ended, RestartRequired):
        return ended.restart
    if is_sized_by_driver(scaling, avoided) and type(ended).__name__ == _START_TIMED_OUT:
        # Sized again: a node that was counted may be gone, which Ray may notice only after a minute.
        return Restart(avoid=avoided)
    if isinstance(ended, RetriesExhausted) or not getattr(error, "worker_failures", None):
        return None
    # Ray's own limit: the last decision of the policy is in the events.
    decided = [
        event for event in read_events(run.folder)
        if event.get("start") == run.lease and event["event"] in ("group_failed", "attempt_ended")
    ]  # fmt: skip
    last = max(decided, key=lambda event: event["attempt"], default={})
    allowed = last.get("retrying") or last.get("status") == RESIZING
    return Restart(avoid=avoided) if allowed else None


def _run_ray_train(
    experiment: Experiment,
    run: Run,
    *,
    resume_options: ResumeOptions,
    wait_timeout_s: float,
    verbose: bool,
    spares: bool,
    mailbox: Any,
    callbacks: Sequence[Callback],
    avoided: frozenset[str],
    is_first: bool,
) -> dict[str, Any]:
    """Run Ray Train once, with the arguments of `run_worker_group`, off the nodes with the ids in `avoided`.

    Ray's own files go to a temporary folder: with the same name and storage Ray Train would resume by itself.
    """
    # Imported here, because it takes 0.1 s and a trial of one worker does not need it.
    from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from .loopback_store import LoopbackTorchConfig

    scaling, retries, parallel = experiment.scaling, experiment.retries, experiment.config.parallel
    is_rays = parallel.backend in RAYS_BACKENDS
    task = make_task(
        experiment, run, resume_options=resume_options, verbose=verbose, mailbox=mailbox, callbacks=callbacks
    )
    # If machines go while an elastic group starts, it is soon sized again.
    start_timeout_s = math.ceil(RAY_LEARNS_S) if scaling.is_elastic else 60
    # Failed starts of a group: each waits for machines for the start timeout, in another group if the driver sizes it.
    most_waits = 0 if is_sized_by_driver(scaling, avoided) else math.ceil(wait_timeout_s / start_timeout_s)
    runtime_env = _runtime_env(scaling, spares=spares)
    with scratch_folder() as ray_dir:
        trainer = passing_function_by_value(TorchTrainer)(
            _train_function(),
            # As bytes, because Ray Train's controller gets it, too, and would import the trainer.
            train_loop_config={"task": cloudpickle.dumps(task), "training": pickle_trainer(experiment)},
            torch_config=(LoopbackTorchConfig if is_on_loopback() and not is_rays else TorchConfig)(
                backend=backend_for(
                    "cuda" if scaling.gpus_per_worker else "cpu",
                    with_cpus=parallel.cpu_offload,
                    backend=parallel.backend,
                ),
                timeout_s=math.ceil(parallel.timeout.amount),
            ),
            scaling_config=ScalingConfig(
                num_workers=workers_to_request(avoided, scaling),
                label_selector=_node_labels(avoided, scaling),
                placement_strategy=scaling.placement_strategy,
                accelerator_type=scaling.accelerator_type,
                # Ray Train would end the group in the middle of an update; see elastic.py.
                elastic_resize_monitor_interval_s=math.inf,
                use_gpu=bool(scaling.gpus_per_worker),
                use_tpu=bool(scaling.resources_per_worker.get("TPU")),
                resources_per_worker=scaling.worker_resources,
            ),
            run_config=RunConfig(
                name=f"{experiment.name}-{run.record.id}",
                storage_path=ray_dir,
                worker_runtime_env=runtime_env,
                failure_config=FailureConfig(
                    max_failures=_MOST_RAY_RETRIES,
                    # Ray Train reports an attempt that it ends at a deadline to no callback, so this is its budget.
                    max_preemption_failures=-1 if retries.max_preemptions is None else retries.max_preemptions,
                    controller_failure_limit=retries.max_failures + most_waits,
                ),
                callbacks=[retry_policy(experiment, run, avoided=avoided)],
                logging_config=LoggingConfig(log_level="INFO" if verbose else "ERROR"),
            ),
        )
        with temporary_env({_START_TIMEOUT: str(start_timeout_s)}, unless_set=True):
            if is_first and is_on_loopback():
                prestart(scaling.max_workers, runtime_env)
            returned: dict[str, Any] = trainer.fit().return_value
        return returned


def _train_function() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the function that Ray Train calls in a worker; local, so that unpickling it imports nothing."""

    def train_worker(settings: dict[str, Any]) -> dict[str, Any]:
        from ..imports import fast_imports

        with fast_imports():
            # Otherwise the first optimizer would import it.
            import torch._dynamo  # noqa: F401

            from .worker import train
        return train(settings)

    return train_worker


def passing_function_by_value(trainer_class: type[Any]) -> type[Any]:
    """Return a subclass of Ray's trainer that sends the training function to each worker with the call that runs it.

    Ray Train puts it into the object store, and each node keeps a copy. When a machine is lost, workers restart before
    Ray has noticed, and one that asks the lost machine for the function waits 10 s before it asks another. The method
    is private: if Ray no longer calls it, or calls it otherwise, only restarts take longer.
    """

    class ByValue(trainer_class):  # type: ignore[misc]
        def _initialize_and_run_controller(self, *others: Any, **settings: Any) -> Any:
            with suppress(KeyError, AttributeError, TypeError):
                settings["train_fn_ref"] = _by_value(settings["train_fn_ref"].get())
            return super()._initialize_and_run_controller(*others, **settings)

    return ByValue


def _by_value(function: Callable[[], Any]) -> Any:
    """Return an object whose `get` returns a function, as a reference to it would, but which contains the function."""
    pickled = cloudpickle.dumps(function)

    # Local, and therefore pickled by value itself: the controller would otherwise import this module and torch.
    class Contained:
        def get(self) -> Any:
            return cloudpickle.loads(pickled)

    return Contained()


def _node_labels(avoided: frozenset[str], scaling: Scaling) -> dict[str, str] | None:
    """Return the labels of the nodes for the workers; None: any node."""
    beside = {"ray.io/node-id": f"!in({','.join(sorted(avoided))})"} if avoided else {}
    return {**scaling.label_selector, **beside} or None


def _runtime_env(scaling: Scaling, *, spares: bool) -> dict[str, Any]:
    """Return Ray's `runtime_env` of the workers."""
    # A spare is prestarted without packages and files of an environment.
    found = environment(torch_threads(scaling)) if spares and not scaling.runtime_env else {}
    if variables := {**found.get("env_vars", {}), **scaling.env}:
        found = {**found, "env_vars": variables}
    return {**scaling.runtime_env, **found}


def workers_to_request(avoided: frozenset[str], scaling: Scaling) -> int | tuple[int, int]:
    """Return the workers to request: as the experiment says, or as many as fit if the driver sizes the group."""
    if not is_sized_by_driver(scaling, avoided):
        return scaling.workers
    least = scaling.min_workers
    most = min(scaling.max_workers, max(least, slots_beside(avoided, scaling)))
    return (least, most) if least < most else least


def retry_policy(experiment: Experiment, run: Run, *, avoided: frozenset[str] = frozenset()) -> RetryPolicy:
    """Return the retry policy of one start of a run."""
    retries = experiment.retries
    return RetryPolicy(
        run.run_dir, start=run.lease, max_failures=retries.max_failures, max_errors=retries.max_errors,
        max_preemptions=retries.max_preemptions, max_lost_nodes=retries.max_lost_nodes, scaling=experiment.scaling,
        avoided=avoided,
    )  # fmt: skip


def make_task(
    experiment: Experiment,
    run: Run,
    *,
    resume_options: ResumeOptions,
    verbose: bool,
    mailbox: Any = None,
    callbacks: Sequence[Callback] = (),
) -> Task:
    """Return the settings for each worker of a run."""
    scaling = experiment.scaling
    return Task(
        run_dir=run.run_dir,
        resume_options=resume_options,
        imports=import_folders(),
        current_dir=os.getcwd(),
        threads=torch_threads(scaling),
        on_cpu=not scaling.gpus_per_worker,
        lease=run.lease,
        driver_host=run.record.driver.host,
        versions=driver_versions(),
        polls_preemption=polls_preemption(),
        monitors_hangs=experiment.retries.hang_timeout is not None,
        capture_output=not verbose,
        max_workers=scaling.max_workers,
        timeout_s=experiment.config.parallel.timeout.amount,
        evaluates_elsewhere=scaling.evaluation_worker is not None,
        mailbox=mailbox,
        callbacks=tuple(callbacks),
    )


def torch_threads(scaling: Scaling) -> int:
    """Return the torch threads of a worker on CPUs."""
    return max(1, int(scaling.cpus_per_worker))


def polls_preemption() -> bool:
    """Return whether Ray Train gives preemption notices."""
    return os.environ.get("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "1").lower() in ("1", "true")


def pickle_trainer(experiment: Experiment) -> bytes:
    """Return the pickled class and config of the trainer, for `unpickle_with_settings`.

    Definitions from a user's file travel by value.
    """
    return _pickle((experiment.trainer, experiment.config), experiment)


def pickle_experiment(experiment: Experiment) -> bytes:
    """Return the pickled experiment, for `unpickle_with_settings`; definitions from a user's file travel by value."""
    return _pickle(experiment, experiment)


def _pickle(value: object, experiment: Experiment) -> bytes:
    scaling = experiment.scaling
    with pickling_by_value(experiment):
        try:
            return pickle_with_settings(value, {*scaling.env, *scaling.runtime_env.get("env_vars", {})})
        except Exception as error:
            raise ConfigError(
                f"{experiment.trainer.__name__} cannot be pickled for the workers ({type(error).__name__}: {error}): "
                "create objects that cannot be pickled in a method of the trainer, not at the top of its file"
            ) from error


@contextmanager
def pickling_by_value(experiment: Experiment) -> Iterator[None]:
    """Pickle definitions from a user's file by value inside this context: workers cannot import the file."""
    names = {each.__module__ for each in (*experiment.trainer.__mro__, *type(experiment.config).__mro__)}
    modules = [module for name in names if is_user_file(module := sys.modules.get(name)) and module is not None]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    # Code that uses torch.backends.cudnn refers to a module of another class, which cloudpickle cannot pickle.
    for kind in {
        type(module) for name, module in list(sys.modules.items()) if f"{name}.".startswith("torch.backends.")
    }:
        if issubclass(kind, types.ModuleType) and kind is not types.ModuleType:
            copyreg.pickle(kind, lambda module: (importlib.import_module, (module.__name__,)))
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
    """Return the error to raise for one of Ray's: the exception of the worker that failed first, or its death."""
    if isinstance(error, ConfigError):
        return error  # of the driver, before there were workers
    errors: dict[int, BaseException] = getattr(error, "worker_failures", None) or {}
    ended = error if isinstance(error, RetriesExhausted) else getattr(error, "controller_failure", None)
    events = [event for event in read_events(run.folder) if event.get("start") == run.lease]
    decided = [event for event in events if event["event"] == "group_failed"]
    raised: BaseException | None = getattr(ended, "raised", None)
    if decided and not decided[-1]["retrying"]:
        failure = failure_of(decided[-1])
    elif errors or raised_failure(events) is not None:
        failure = find_cause(events, errors, run.folder)
    else:
        # A worker that failed its first check has written no event.
        return raised if _is_ours(raised) else _error_without_failure(error, ended)
    raised = (errors.get(failure.rank) if failure.rank is not None else None) or raised
    if _is_ours(raised):
        return raised
    text = str(failure)
    before = [event["text"] for event in decided if event["text"] != text]
    first = f"; the first of {len(decided)} failures: {before[0]}" if before else ""
    why = f"; {decided[-1]['next']}" if decided and decided[-1].get("next") and not decided[-1]["retrying"] else ""
    recorded = raised_failure(events)
    failed = TrainingFailedError(
        f"{text} (attempt {failure.attempt}){why}{first}", rank=failure.rank, attempt=failure.attempt,
        step=failure.step, worker_traceback=recorded.traceback if recorded and failure.kind else "",
    )  # fmt: skip
    if failure.last_words:
        failed.add_note(f"the last output of the process: {failure.last_words}")
    # Ray's errors of a dead process name many objects and no cause.
    if raised is not None and failure.kind:
        failed.__cause__ = raised
    return failed


def _is_ours(error: BaseException | None) -> TypeGuard[Exception]:
    # By module: the errors of headway.datasets have no base class in common with the trainer's.
    return isinstance(error, Exception) and type(error).__module__.startswith("headway.")


def _error_without_failure(error: BaseException, ended: BaseException | None) -> TrainingFailedError:
    """Return the error for an end of Ray Train that no worker's failure explains."""
    lost = (RayActorError, RayTaskError, RaySystemError, OutOfMemoryError, ConnectionError)
    if isinstance(error, lost) and ended is None:
        text = str(error)
        if isinstance(error, OutOfMemoryError) or "OUT_OF_MEMORY" in text or "low on memory" in text:
            found = re.search(r"[\d.]+GB used / [\d.]+GB", text)
            amount = f": {found[0]}" if found else ""
            cause = f"Ray ended Ray Train's controller, because its node ran out of memory{amount}"
        elif "worker process has died" in text:
            cause = "Ray Train's controller is gone: its process died, alone or with the head node of the cluster"
        else:
            cause = "Ray Train's controller is gone, most likely with the head node of the cluster"
    else:
        inner = ended or error
        lines = str(inner).strip().splitlines()
        cause = f"Ray Train has ended the run: {type(inner).__name__}: {lines[0] if lines else ''}"
    failed = TrainingFailedError(cause)
    failed.__cause__ = error
    return failed
