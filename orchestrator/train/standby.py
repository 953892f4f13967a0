"""Worker processes in reserve: on each machine one per rank, idle, with everything imported that a rank imports.

Half of what a killed worker costs is the start of other processes: interpreters, Ray, torch. Ray starts processes ahead
of time if it is asked to, and gives them to the next actors of the same job and environment; a hook in that environment
imports. A spare has been given no work before it is taken: no job, no device, no random numbers were ever its own.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headway.trainer.callbacks.base import Callback
from headway.trainer.trainer import Trainer

logger = logging.getLogger("headway.orchestrator")

ENVIRONMENT = "HEADWAY_SPARES"
"""In a worker that has spares: the threads that it computes with. Empty in what it starts for other purposes."""
_HOOK = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"
# Imports take the processor from the training, so they wait until it has come up.
_DELAY_S = 5.0
_KEEP_S = 7 * 24 * 3600


def environment(threads: int) -> dict[str, Any]:
    """Returns Ray's `runtime_env` for workers that have spares; empty where the job has a hook of its own.

    Args:
        threads: that a worker computes with.
    """
    import ray

    here = ray.get_runtime_context().runtime_env
    if "worker_process_setup_hook" in here or _HOOK in (here.get("env_vars") or {}):
        return {}
    try:
        from ray._private.runtime_env.setup_hook import export_setup_func_callable
        from ray._private.worker import global_worker

        # Ray Train writes the environment of its workers as JSON, so the function itself must not be in it.
        exported = export_setup_func_callable({"env_vars": {}}, _hook(__file__), global_worker)
    except Exception as error:
        _do_without(error)
        return {}
    return {"env_vars": {**exported["env_vars"], ENVIRONMENT: str(threads)}}


def _hook(file: str) -> Callable[[], None]:
    """Returns what every process of the environment does first."""

    def warm() -> None:
        import contextlib
        import importlib.util
        import os
        import sys

        before = dict(os.environ)
        # An error would end the process; the worker that it becomes will say what is missing.
        with contextlib.suppress(Exception):
            from ray._private.worker import global_worker

            threads = os.environ["HEADWAY_SPARES"]
            folder = os.path.join(global_worker.node.get_session_dir_path(), "headway-spares")
            # The workers of the first attempt, and what libraries start inside of them, have the same environment. A
            # spare was launched after it was asked for, and each is asked for by one file.
            launched_ms = next(int(each.split("=")[1]) for each in sys.argv if each.startswith("--worker-launch-time-"))
            asked = [each for each in os.listdir(folder) if launched_ms >= int(each.split("-")[0])]
            while asked and threads:
                try:
                    os.unlink(os.path.join(folder, asked.pop()))
                    break
                except FileNotFoundError:
                    continue
            else:
                return
            # Ray says it when the process is given its work; libraries that are imported before would not hear of it.
            os.environ.setdefault("OMP_NUM_THREADS", threads)
            # What a job adds to the path comes later: with another Headway in it, this process stays as it is.
            found = importlib.util.find_spec("headway.orchestrator.train.standby")
            if found is not None and found.origin == file:
                for name in (
                    "ray.train.torch", "ray.data", "headway.orchestrator.train.worker", "headway.datasets.stream",
                    # Imported by the first update, whether anything is compiled or not.
                    "torch._dynamo",
                ):  # fmt: skip
                    importlib.import_module(name)
        # Torch writes there too, when it is imported.
        for name in os.environ.keys() - before.keys():
            del os.environ[name]

    # By value: a process that cannot find Headway at this time of its life would end if it had to import the hook.
    warm.__module__ = "__main__"
    return warm


class Spares(Callback):
    """Asks for a successor of this process once it trains, if it was started with an `environment` for that."""

    def __init__(self) -> None:
        self._timer = threading.Timer(_DELAY_S, _reserve)
        self._timer.daemon = True

    def on_fit_start(self, trainer: Trainer[Any]) -> None:
        """Sets the time."""
        if os.environ.get(ENVIRONMENT):
            self._timer.start()

    def on_fit_end(self, trainer: Trainer[Any], error: BaseException | None) -> None:
        """Asks no more."""
        self._timer.cancel()


def _reserve() -> None:
    """Has Ray start one process on this machine, in the environment of this one, for this job."""
    import ray

    try:
        from ray._private.grpc_utils import init_grpc_channel
        from ray._private.worker import global_worker
        from ray.core.generated.common_pb2 import Language
        from ray.core.generated.node_manager_pb2 import PrestartWorkersRequest
        from ray.core.generated.node_manager_pb2_grpc import NodeManagerServiceStub

        context, node = ray.get_runtime_context(), global_worker.node
        asked = Path(node.get_session_dir_path(), "headway-spares", f"{time.time_ns() // 10**6}-{uuid.uuid4().hex}")
        asked.parent.mkdir(exist_ok=True)
        asked.touch()
        runtime_env = context.runtime_env
        request = PrestartWorkersRequest(
            language=Language.PYTHON,
            job_id=bytes.fromhex(context.get_job_id()),
            keep_alive_duration_secs=_KEEP_S,
            num_workers=1,
        )
        # The hash of this very text decides whether a process fits.
        request.runtime_env_info.serialized_runtime_env = context.get_runtime_env_string()
        if uri := runtime_env.working_dir_uri():
            request.runtime_env_info.uris.working_dir_uri = uri
        request.runtime_env_info.uris.py_modules_uris.extend(runtime_env.py_modules_uris())
        with init_grpc_channel(f"{node.node_ip_address}:{node.node_manager_port}") as channel:
            NodeManagerServiceStub(channel).PrestartWorkers(request, timeout=30)
    except Exception as error:
        _do_without(error)


def _do_without(error: Exception) -> None:
    """Nothing that is used of Ray here is what it promises. Without it a restart takes longer, and that is all."""
    logger.warning("no process can be kept in reserve (%s: %s)", type(error).__name__, error)
