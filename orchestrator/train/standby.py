"""Worker processes that start before they are needed: the first ones of a run, and one spare per rank.

Half of the cost of a killed worker is the start of its successor: the interpreter, Ray, torch. Ray can prestart
processes and gives them to the next actors of the same job and runtime environment; a hook in that environment imports.
A process has had no work before it is taken: no job, device or RNG state.

On the machine of the driver, the first workers start while Ray Train's controller does. They import only torch and Ray
Train: if the controller asked before they are ready, Ray would start others.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
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
_KEEP_FIRST_S = 300


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
        import gc
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
            request = ""
            while asked and threads and not request:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(folder, asked[-1]))
                    request = asked[-1]
                asked.pop()
            if not request:
                return
            # Ray sets it only when the process gets its work, which is too late for libraries imported here.
            os.environ.setdefault("OMP_NUM_THREADS", threads)
            # A job's import path is set later. If it will import another Headway, do not import this one.
            found = importlib.util.find_spec("headway.orchestrator.train.standby")
            if found is not None and found.origin == file:
                names = [
                    "ray.train.torch", "ray.data", "headway.orchestrator.train.worker", "headway.datasets.stream",
                    # Imported by the first update, whether anything is compiled or not.
                    "torch._dynamo",
                ]  # fmt: skip
                gc.disable()
                for name in names[:1] if request.endswith("-first") else names:
                    importlib.import_module(name)
        gc.enable()
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


def prestart(workers: int, runtime_env: Mapping[str, Any]) -> None:
    """Start the processes of the first workers, on this machine, before Ray Train asks for them.

    Args:
        workers: how many.
        runtime_env: Ray's `runtime_env` of the workers, as returned by `environment`; otherwise nothing happens.
    """
    import ray

    if ENVIRONMENT not in runtime_env.get("env_vars", {}) or ray.get_runtime_context().runtime_env:
        return
    try:
        from ray.train.v2._internal import constants

        # From the driver to Ray Train's controller, and from there to the workers.
        inherited = {
            constants.RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR:
            constants.DEFAULT_RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_VALUE,
            **constants.get_env_vars_to_propagate(),
        }  # fmt: skip
    except (ImportError, AttributeError) as error:
        _do_without(error)
        return
    variables = {**inherited, **runtime_env["env_vars"]}
    # As Ray writes it for an actor that inherits variables.
    text = json.dumps({"env_vars": variables}, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    _reserve(workers, text, keep_s=_KEEP_FIRST_S, suffix="-first")


def _reserve(processes: int = 1, runtime_env: str | None = None, *, keep_s: int = _KEEP_S, suffix: str = "") -> None:
    """Make Ray prestart processes on this machine, in this process's job.

    Args:
        processes: how many.
        runtime_env: their environment, by default that of this process. Ray matches processes by the hash of this text.
        keep_s: for how long Ray keeps those that are not needed.
        suffix: of the names of the requests.
    """
    import ray

    try:
        from ray._private.grpc_utils import init_grpc_channel
        from ray._private.worker import global_worker
        from ray.core.generated.common_pb2 import Language
        from ray.core.generated.node_manager_pb2 import PrestartWorkersRequest
        from ray.core.generated.node_manager_pb2_grpc import NodeManagerServiceStub

        context, node = ray.get_runtime_context(), global_worker.node
        folder = Path(node.get_session_dir_path(), "headway-spares")
        folder.mkdir(exist_ok=True)
        for _ in range(processes):
            (folder / f"{time.time_ns() // 10**6}-{uuid.uuid4().hex}{suffix}").touch()
        request = PrestartWorkersRequest(
            language=Language.PYTHON,
            job_id=bytes.fromhex(context.get_job_id()),
            keep_alive_duration_secs=keep_s,
            num_workers=processes,
        )
        request.runtime_env_info.serialized_runtime_env = runtime_env or context.get_runtime_env_string()
        if uri := context.runtime_env.working_dir_uri():
            request.runtime_env_info.uris.working_dir_uri = uri
        request.runtime_env_info.uris.py_modules_uris.extend(context.runtime_env.py_modules_uris())
        with init_grpc_channel(f"{node.node_ip_address}:{node.node_manager_port}") as channel:
            NodeManagerServiceStub(channel).PrestartWorkers(request, timeout=30)
    except Exception as error:
        _do_without(error)


def _do_without(error: Exception) -> None:
    """Log that no process can start early: this needs private parts of Ray, without which a start takes longer."""
    logger.warning(
        "cannot start worker processes early, so starts and restarts take longer (%s: %s)", type(error).__name__, error
    )
