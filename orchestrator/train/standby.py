"""Spare worker processes: on each machine one idle process per rank, with everything imported that a rank imports.

Half of the cost of a killed worker is the start of its successor: the interpreter, Ray, torch. Ray can prestart
processes and gives them to the next actors of the same job and runtime environment; a hook in that environment imports.
A spare has had no work before it is taken: no job, device or RNG state.
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

logger = logging.getLogger(__name__)

ENVIRONMENT = "HEADWAY_SPARES"
"""Set in a worker that has spares: its number of torch threads."""
_HOOK = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"
# Imports compete with the training for the CPU, so they wait until it has started.
_DELAY_S = 5.0
_KEEP_S = 7 * 24 * 3600


def environment(threads: int) -> dict[str, Any]:
    """Return Ray's `runtime_env` for workers with spares; empty if the job has its own setup hook.

    Args:
        threads: torch threads of a worker.
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
    """Return the setup hook of every process of the environment."""

    def warm() -> None:
        import contextlib
        import importlib.util
        import os
        import sys

        before = dict(os.environ)
        # An error here would end the process; the worker that it becomes will report what is missing.
        with contextlib.suppress(Exception):
            from ray._private.worker import global_worker

            threads = os.environ["HEADWAY_SPARES"]
            folder = os.path.join(global_worker.node.get_session_dir_path(), "headway-spares")
            # The first workers, and processes that libraries start in them, have the same environment. A spare was
            # launched after its request, and each request is one file.
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
            # Ray sets it only when the process gets its work, which is too late for libraries imported here.
            os.environ.setdefault("OMP_NUM_THREADS", threads)
            # A job's import path is set later. If it will import another Headway, do not import this one.
            found = importlib.util.find_spec("headway.orchestrator.train.standby")
            if found is not None and found.origin == file:
                for name in (
                    "ray.train.torch", "ray.data", "headway.orchestrator.train.worker", "headway.datasets.stream",
                    # Imported by the first update, whether anything is compiled or not.
                    "torch._dynamo",
                ):  # fmt: skip
                    importlib.import_module(name)
        # Importing torch sets variables, too.
        for name in os.environ.keys() - before.keys():
            del os.environ[name]

    # Pickled by value: at this time the process may not be able to import Headway.
    warm.__module__ = "__main__"
    return warm


class Spares(Callback):
    """Requests a spare for this process once it trains, if it was started with `environment`."""

    def __init__(self) -> None:
        self._timer = threading.Timer(_DELAY_S, _reserve)
        self._timer.daemon = True

    def on_fit_start(self, trainer: Trainer[Any]) -> None:
        """Start the timer."""
        if os.environ.get(ENVIRONMENT):
            self._timer.start()

    def on_fit_end(self, trainer: Trainer[Any], error: BaseException | None) -> None:
        """Cancel the request."""
        self._timer.cancel()


def _reserve() -> None:
    """Make Ray prestart one process on this machine, in this process's environment and job."""
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
        # Ray matches processes by the hash of this text.
        request.runtime_env_info.serialized_runtime_env = context.get_runtime_env_string()
        if uri := runtime_env.working_dir_uri():
            request.runtime_env_info.uris.working_dir_uri = uri
        request.runtime_env_info.uris.py_modules_uris.extend(runtime_env.py_modules_uris())
        with init_grpc_channel(f"{node.node_ip_address}:{node.node_manager_port}") as channel:
            NodeManagerServiceStub(channel).PrestartWorkers(request, timeout=30)
    except Exception as error:
        _do_without(error)


def _do_without(error: Exception) -> None:
    """Log that spares are unavailable: they need private parts of Ray, without which restarts take longer."""
    logger.warning("cannot keep a spare worker process, so restarts take longer (%s: %s)", type(error).__name__, error)
