"""A Ray head with a dashboard, started as by `ray start --head`, for tests that submit jobs."""

from __future__ import annotations

import contextlib
import json
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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ray.util import get_node_ip_address

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
def head(*options: str, num_cpus: int = 4, port: int | None = None, **variables: str) -> Iterator[str]:
    """Start a head, yield the address of its dashboard, and stop what was started here."""
    # One more than needed, in case the given port is among them.
    free = [each for each in free_ports(9) if each != port]
    ports = [port or free[0], *free[1:8]]
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


@contextlib.contextmanager
def growing_head(folder: Path, resources: Mapping[str, float], **groups: Mapping[str, Any]) -> Iterator[int]:
    """Start a head whose autoscaler starts machines as local processes, and yield the head's port.

    Ray's `AutoscalingCluster` is unsuitable: it stops every Ray on the machine before and after, and reads the
    defaults of its provider from a file that is not in Ray's wheel. An "external" provider needs none.

    Args:
        folder: for the launcher file.
        resources: of the head.
        groups: `resources` and `max_workers` of each group of machines.
    """
    (port,) = free_ports(1)
    config = {
        "cluster_name": "test",
        "max_workers": sum(group["max_workers"] for group in groups.values()),
        "idle_timeout_minutes": 0.1,
        "provider": {
            "type": "external",
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "gcs_address": f"{get_node_ip_address()}:{port}",
            # All machines have the same address.
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": resources, "node_config": {}, "max_workers": 0},
            **{name: {"node_config": {}, "min_workers": 0, **group} for name, group in groups.items()},
        },
        **dict.fromkeys(("file_mounts", "auth"), {}),
        **dict.fromkeys(("cluster_synced_files", "setup_commands", "head_setup_commands", "worker_setup_commands"), []),
        **dict.fromkeys(("initialization_commands", "head_start_ray_commands", "worker_start_ray_commands"), []),
    }
    file = folder / "autoscaling.json"
    file.write_text(json.dumps(config))
    variables = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", "PYTHONPATH": os.environ["PYTHONPATH"]}
    # Workers must be children of their raylet, which tells the machine.
    variables["HEADWAY_TESTS_ZYGOTE"] = ""
    others = json.dumps({name: amount for name, amount in resources.items() if name != "CPU"})
    options = f"--autoscaling-config={file}", f"--resources={others}"
    with head(*options, num_cpus=int(resources["CPU"]), port=port, **variables):
        yield port


def _processes(port: int, is_one: Callable[[list[bytes]], bool]) -> set[int]:
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes().split(b"\0")
            if is_one(command) and any(f":{port}".encode() in each for each in command):
                found.add(int(folder.name))
    return found


def raylets(port: int) -> set[int]:
    """Return the processes that stand for the machines of a cluster, by the port of its head."""
    return _processes(port, lambda command: command[0].endswith(b"/raylet"))


@contextlib.contextmanager
def paused_autoscaler(port: int) -> Iterator[None]:
    """Stop the autoscaler of a head, so that no machine comes meanwhile."""
    (autoscaler,) = _processes(port, lambda command: any(each.endswith(b"/monitor.py") for each in command))
    os.kill(autoscaler, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(autoscaler, signal.SIGCONT)


def headway_on(port: int, *arguments: str) -> subprocess.Popen[str]:
    """Start the command `headway` with the cluster at this port, in the repository, with its output to be read."""
    root = Path(__file__).parents[1]
    path = os.pathsep.join((str(root / "build/types"), str(root)))
    return subprocess.Popen(
        [sys.executable, "-m", "headway.orchestrator", *arguments],
        env={**environment(), "RAY_ADDRESS": f"127.0.0.1:{port}", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def wait_until(holds: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    """Wait until something holds; fail with the output of a process if it ends before."""
    deadline = time.monotonic() + 200
    while not holds():
        if process is not None and (process.poll() is not None or time.monotonic() > deadline):
            process.kill()
            raise AssertionError(f"the process has ended, or is late: {process.communicate()[0]}")
        assert time.monotonic() < deadline, "late"
        time.sleep(0.1)


def status(port: int) -> str:
    """Return the autoscaler's report, to understand a failure."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "status", "--verbose", f"--address=127.0.0.1:{port}"]
    shown = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=300)
    return shown.stdout + shown.stderr


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
