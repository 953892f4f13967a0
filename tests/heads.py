"""A head of Ray with a dashboard, as `ray start --head` makes one on a cluster, for tests that submit to it."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

# What the tests set for their own Ray, and what would lead to another one.
_NOT_THERE = ("PYTHONPATH", "RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER")

TOKEN = "0123456789abcdef" * 4


def environment() -> dict[str, str]:
    """That of a machine on which nobody has set anything for Headway, with the token that opens the cluster."""
    binaries = str(Path(sys.executable).parent)
    path = f"{binaries}{os.pathsep}{os.environ['PATH']}"
    there = {name: value for name, value in os.environ.items() if name not in _NOT_THERE}
    return {**there, "PATH": path, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}


@contextlib.contextmanager
def head(*options: str, num_cpus: int = 4, **variables: str) -> Iterator[str]:
    """Starts a head, and gives the address of its dashboard. Ends what it started, and nothing else."""
    ports = free_ports(8)
    # Short: sockets lie in it, and their names may not be long.
    folder = tempfile.mkdtemp(prefix="hw", dir="/tmp")
    names = (
        "port", "dashboard-port", "ray-client-server-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port",
        "metrics-export-port", "node-manager-port", "object-manager-port",
    )  # fmt: skip
    command = [
        str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--disable-usage-stats",
        "--dashboard-host=127.0.0.1", "--include-dashboard=true", f"--num-cpus={num_cpus}", f"--temp-dir={folder}",
        *(f"--{name}={port}" for name, port in zip(names, ports, strict=True)), *options,
    ]  # fmt: skip
    with open(f"{folder}/head.txt", "w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env={**environment(), **variables}
        )
    try:
        wait_for_answer(f"http://127.0.0.1:{ports[1]}/api/version", process, Path(folder, "head.txt"))
        yield f"http://127.0.0.1:{ports[1]}"
    finally:
        end(process)
        shutil.rmtree(folder, ignore_errors=True)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a head: asked, it ends all that it started; what is left of them is killed."""
    theirs = descendants(process.pid)
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(20)
    process.kill()
    process.wait()
    for pid, started in theirs.items():
        if start_of(pid) == started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> dict[int, str]:
    """Processes below one, and when each was started: a number may be given again."""
    found: dict[int, str] = {}
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, tasks.read_text().split()):
                found |= {child: start_of(child), **descendants(child)}
    return found


def start_of(pid: int) -> str:
    """When a process was started, in ticks since the machine was; empty if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on at the moment.

    Below those that Linux gives to connections, and above those of Ray's workers: other tests take such at any time.
    """
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        for port in random.SystemRandom().sample(range(20000, 32000), 1000):
            if len(found) < count:
                with contextlib.suppress(OSError):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
                    found.append(port)
        assert len(found) == count, "no ports are free between 20000 and 32000"
        return found


def wait_for_answer(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Waits until a head answers, to one who has the token."""
    deadline = time.monotonic() + 240
    # No proxy has to do with this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {TOKEN}"})
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            opener.open(asked, timeout=10).close()
            return
        time.sleep(0.2)
    raise AssertionError(f"the head did not come up:\n{log.read_text()}")
