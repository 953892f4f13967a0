"""A warm process that has imported what Ray workers import, and forks them: in 0.1 s of CPU instead of 4.

Half of what the tests on Ray would take is each worker's import of Ray, torch and Headway. Workers of a job that has
brought Headway import it themselves, from there. What is forked is a process like any other: with its own pid, killed
by signals, and registered with Ray by itself.

A process connects to a socket (sitecustomize.py), passes its arguments, environment and output, and waits for the end
of the worker. There is one warm process per environment, because some variables are read when Ray is imported. Each
takes a quarter of a GB, so only those are kept that were used last.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib
import json
import os
import random
import runpy
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Any

import numpy

_IMPORTS = ("ray.train.torch", "ray.tune", "ray.data", "torch._dynamo", "ray.dashboard.modules.job.job_supervisor")
_MOST_WARM = 6
_IMPORTS_OF_HEADWAY = ("headway.orchestrator.train.worker", "headway.datasets.stream")
# Variables that differ between workers, and are not read at import. RAY_JOB_ID is: Ray's core keeps it.
_OF_ONE_WORKER = {
    "PWD", "OLDPWD", "SHLVL", "_", "PYTHONPATH", "PYTEST_CURRENT_TEST",
    "RAY_RAYLET_PID", "RAY_TMPDIR", "RAY_ADDRESS", "RAY_DEDUP_LOGS_SKIP_REGEX", "PL_DISABLE_FORK",
    "RAY_prestart_worker_first_driver", "RAY_raylet_start_wait_time_s", "PYTHONBREAKPOINT",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC", "RAY_JOB_STOP_WAIT_TIME_S",
    "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "COLOR", "TOKEN",
}  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """A request for a worker."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str

    @property
    def brings_headway(self) -> bool:
        """Whether a job may have brought its own copy of Headway."""
        return "runtime_resources" in self.environment.get("PYTHONPATH", "")

    @property
    def key(self) -> str:
        """The environment that all workers of a warm process share."""
        shared = sorted(item for item in self.environment.items() if item[0] not in _OF_ONE_WORKER)
        return json.dumps([self.brings_headway, shared])


def serve(server: socket.socket) -> None:
    """Pass workers to the warm processes of their environments, until the parent process is gone."""
    parent = os.getppid()
    # The processes below are not waited for.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    warm: dict[str, socket.socket] = {}
    server.settimeout(1.0)
    while os.getppid() == parent:
        try:
            client, _ = server.accept()
        except TimeoutError:
            continue
        # A process may be killed or stopped while it asks.
        client.settimeout(30)
        try:
            message, files = receive(client)
        except OSError:
            client.close()
            continue
        client.settimeout(None)
        asked = understood(message)
        if asked is not None:
            if asked.key not in warm:
                ours, theirs = socket.socketpair()
                if os.fork() == 0:
                    for each in (server, client, ours, *warm.values()):
                        each.close()
                    close(files)
                    fork_workers(theirs, asked)
                    return
                theirs.close()
                warm[asked.key] = ours
            # The last one is the one that was used last.
            warm[asked.key] = warm.pop(asked.key)
            if len(warm) > _MOST_WARM:
                warm.pop(next(iter(warm))).close()
            try:
                send(warm[asked.key], asked.__dict__, [client.fileno(), *files])
            except OSError:
                # It has ended. This worker starts as it does for users, and the next one gets another warm process.
                warm.pop(asked.key).close()
        client.close()
        close(files)


def understood(message: Any) -> Asked | None:
    """Do what Ray's setup_worker.py would do, if that only sets environment variables."""
    arguments, environment, folder = message
    if arguments[0].endswith("setup_worker.py"):
        parser = argparse.ArgumentParser()
        parser.add_argument("--serialized-runtime-env-context", default="{}")
        parser.add_argument("--language")
        options, arguments = parser.parse_known_args(arguments[1:])
        context = json.loads(options.serialized_runtime_env_context)
        prefix = context.get("command_prefix")
        if (
            options.language not in (None, "PYTHON")
            or (prefix and (len(prefix) != 3 or prefix[::2] != ["cd", "&&"]))
            or context.get("override_worker_entrypoint")
            or not is_this_python(context.get("py_executable", sys.executable))
            or any("$" in value for value in context.get("env_vars", {}).values())
            # Spares, which warm their workers themselves, are under test.
            or context.get("env_vars", {}).get("HEADWAY_SPARES")
        ):
            return None
        environment = {**environment, **context.get("env_vars", {})}
        folder = prefix[1] if prefix else folder
    return Asked(arguments, environment, folder) if arguments[0].endswith("default_worker.py") else None


def is_this_python(executable: str) -> bool:
    """Return whether a command starts the interpreter of this environment, under any of its names."""
    return os.path.dirname(executable) == os.path.dirname(sys.executable) and os.path.samefile(
        executable, sys.executable
    )


def fork_workers(source: socket.socket, first: Asked) -> None:
    """Import, and fork a worker for each message. Returns in the worker, after its end."""
    installed = [folder for folder in sys.path[1:] if folder not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    become(first, installed)
    # Ray's core reads this when it is imported, and ends a worker when that process is gone. Workers of many raylets
    # are forked from this one; sitecustomize.py ends each with its raylet.
    os.environ["RAY_RAYLET_PID"] = str(os.getppid())
    warm_up(_IMPORTS if first.brings_headway else (*_IMPORTS, *_IMPORTS_OF_HEADWAY))
    while True:
        try:
            message, (client, *files) = receive(source)
        except OSError:
            break
        if os.fork() == 0:
            source.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setpgid(0, 0)
            for number, file in enumerate(files):
                os.dup2(file, number)
            close(files)
            os.write(client, b"1")
            # If the process that this one replaces is killed, this one must end, too.
            fcntl.fcntl(client, fcntl.F_SETOWN, os.getpid())
            fcntl.fcntl(client, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(client, fcntl.F_SETFL, fcntl.fcntl(client, fcntl.F_GETFL) | os.O_ASYNC)
            asked = Asked(**message)
            become(asked, installed)
            random.seed()
            numpy.random.seed()
            runpy.run_path(asked.arguments[0], run_name="__main__")
            return
        close([client, *files])
    # The parent of its workers, which the system removes when they end.
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def warm_up(names: tuple[str, ...]) -> None:
    """Import modules without drawing from the RNG of Ray's core, or forks would give their objects equal ids.

    Raises:
        RuntimeError: a number was drawn.
    """
    import ray.actor

    class Unpredictable:
        """Record the actor classes that are defined while modules are imported."""

        @staticmethod
        def from_random() -> Any:
            return named(os.urandom(named.size()))

    named, ray.actor.ActorClassID = ray.actor.ActorClassID, Unpredictable
    for name in names:
        importlib.import_module(name)
    ray.actor.ActorClassID = named

    drawn = []
    for _ in range(2):
        reads, writes = os.pipe()
        if os.fork() == 0:
            os.write(writes, ray.PlacementGroupID.of(ray.JobID.from_int(1)).binary())
            os._exit(0)
        drawn.append(os.read(reads, 64))
        close([reads, writes])
    if drawn[0] == drawn[1]:
        raise RuntimeError("something that was imported has used the generator of Ray's core")


def become(asked: Asked, installed: list[str]) -> None:
    """Give this interpreter the state of one that was started for the request."""
    os.environ.clear()
    os.environ.update(asked.environment)
    with contextlib.suppress(OSError):
        os.chdir(asked.folder)
    sys.argv = asked.arguments
    named = [folder for folder in asked.environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[:] = [os.path.dirname(asked.arguments[0]), *named, *installed]


def send(to: socket.socket, message: Any, files: list[int]) -> None:
    """Send a message of any size, with open files."""
    text = json.dumps(message).encode()
    socket.send_fds(to, [len(text).to_bytes(4, "big")], files)
    to.sendall(text)


def receive(source: socket.socket) -> tuple[Any, list[int]]:
    """Receive a message from `send`.

    Raises:
        OSError: the connection was closed before the message was complete.
    """
    size, files, _, _ = socket.recv_fds(source, 4, 8)
    missing, text = int.from_bytes(size, "big"), b""
    try:
        while len(text) < missing:
            part = source.recv(missing - len(text))
            if not part:
                raise ConnectionError("closed within a message")
            text += part
        if not size:
            raise ConnectionError("closed before a message")
    except OSError:
        close(files)
        raise
    return json.loads(text), files


def close(files: list[int]) -> None:
    """Close files that were passed on."""
    for file in files:
        os.close(file)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
