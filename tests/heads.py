"""A Ray head with a dashboard, started as by `ray start --head`, for tests that submit jobs."""

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

# Variables set for the tests' own Ray, and those that would select another one.
_NOT_THERE = ("PYTHONPATH", "RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER")

TOKEN = "0123456789abcdef" * 4


def environment() -> dict[str, str]:
    """Return an environment without settings for Headway or Ray, with the token of the cluster."""
    binaries = str(Path(sys.executable).parent)
    path = f"{binaries}{os.pathsep}{os.environ['PATH']}"
    there = {name: value for name, value in os.environ.items() if name not in _NOT_THERE}
    if "HEADWAY_TESTS_ZYGOTE" in os.environ:
        there["PYTHONPATH"] = str(Path(__file__).parent / "warm")
    return {**there, "PATH": path, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}


@contextlib.contextmanager
def head(*options: str, num_cpus: int = 4, **variables: str) -> Iterator[str]:
    """Start a head, yield the address of its dashboard, and stop what was started here."""
    ports = free_ports(8)
    # Short: it contains sockets, whose paths are limited in length.
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
    """Stop a head, which stops its processes; kill those that remain."""
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
    """Return the descendants of a process with their start times, because process ids are reused."""
    found: dict[int, str] = {}
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, tasks.read_text().split()):
                found |= {child: start_of(child), **descendants(child)}
    return found


def start_of(pid: int) -> str:
    """Return the start time of a process in ticks since boot; empty if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def free_ports(count: int) -> list[int]:
    """Return ports that are free at the moment.

    Below Linux's ephemeral ports and above those of Ray's workers, which other tests may take at any time.
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
    """Wait until a head answers requests with the token."""
    deadline = time.monotonic() + 240
    # Do not use a proxy for this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {TOKEN}"})
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            opener.open(asked, timeout=10).close()
            return
        time.sleep(0.2)
    raise AssertionError(f"the head did not come up:\n{log.read_text()}")
