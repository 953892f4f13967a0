"""Goodput while workers are killed or machines are lost: the share of time spent on updates that count.

Two workers, updates of 200 ms, a checkpoint every 3 s, for GOODPUT_MINUTES (default 10). `goodput` kills a worker every
30 s; `goodput:machines` kills one of three Ray nodes of this machine, with all its processes, every 60 s, and starts
another one. The times are those of orchestrator/runs/goodput.py, from the first update. The start and the end of the
run are printed but not included, because a run of weeks pays for them once.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headway.orchestrator.cluster.ray_env import quiet_environment
from headway.orchestrator.runs.goodput import GoodputReport, goodput_report
from headway.orchestrator.runs.requests import StopRequest, request_stop
from headway.orchestrator.storage.events import Event, read_events
from headway.orchestrator.storage.folder import Folder

from .restart import start
from .table import Row

HERE = Path(__file__).parent
TARGET = 0.7
KILL_EVERY_S, LOSE_EVERY_S = 30.0, 60.0
_ONCE = ("waiting for machines", "starting", "importing", "ending")


def rows(faults: str = "workers", minutes: float = float(os.environ.get("GOODPUT_MINUTES", "10"))) -> list[Row]:
    """Measure one run, and print where its time went.

    Args:
        faults: "workers" or "machines".
        minutes: of training with faults.
    """
    what, measure = {
        "workers": (f"a worker killed every {KILL_EVERY_S:.0f} s", kill_workers),
        "machines": (f"one of three nodes lost every {LOSE_EVERY_S:.0f} s", lose_machines),
    }[faults]
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
        count = measure(folder, minutes)
        report = goodput_report(read_events(Folder(f"{folder}/goodput")))
    for name, seconds in report.seconds.items():
        print(f"  goodput, {name}: {seconds:.1f} s")
    print(f"  goodput, {count} faults, {report.attempts} attempts, {report.steps_again} updates repeated")
    share = share_while_training(report)
    return [
        Row(
            f"goodput: {what} for {minutes:g} min, 2 Ray workers",
            f"{100 * share:.0f} %",
            f"{100 * TARGET:.0f} %",
            share / TARGET,
            ">= 1",
            share >= TARGET,
        )
    ]


def kill_workers(folder: str, minutes: float) -> int:
    """Train on a Ray of the run's own, and kill rank 1 and rank 0 alternately; return the number of kills."""

    def kill(number: int, attempt: Event) -> None:
        os.kill(attempt["workers"][number % 2]["pid"], signal.SIGKILL)

    process = start(command(folder, "retries.max_failures=1000"))
    return _with_faults(process, folder, minutes, KILL_EVERY_S, kill)


def lose_machines(folder: str, minutes: float) -> int:
    """Train with the default retries on nodes, and lose that of rank 1 and of rank 0 alternately; return how many."""
    # Separate, or other programs on this machine would find this Ray. Short, because it contains sockets.
    rays_files = tempfile.mkdtemp(prefix="hw-")
    os.environ["RAY_TMPDIR"] = rays_files
    quiet_environment()
    from ray.cluster_utils import Cluster

    # Without "dashboard_port": None, Ray tests whether port 8265 is free.
    head = {"num_cpus": 0, "include_dashboard": False, "dashboard_port": None}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        nodes = {node.node_id: node for node in (cluster.add_node(num_cpus=1, wait=False) for _ in range(3))}
        cluster.wait_for_nodes(timeout=180)

        def lose(number: int, attempt: Event) -> None:
            cluster.remove_node(nodes.pop(attempt["workers"][number % 2]["node"]), allow_graceful=False)
            added = cluster.add_node(num_cpus=1, wait=False)
            nodes[added.node_id] = added

        process = start(command(folder), RAY_ADDRESS=cluster.address)
        return _with_faults(process, folder, minutes, LOSE_EVERY_S, lose)
    finally:
        cluster.shutdown()
        shutil.rmtree(rays_files, ignore_errors=True)


def command(folder: str, *settings: str) -> list[str]:
    """Return the command of a run that trains until it is stopped."""
    return [
        sys.executable, "-m", "headway.orchestrator", "fit", str(HERE / "goodput_headway.py"), "name=goodput",
        f"storage={folder}", "scaling.workers=2", "config.step_s=0.2", "config.max_steps=1000000",
        "config.checkpoint.every=3s", "config.log_every=10 steps", *settings,
    ]  # fmt: skip


def _with_faults(
    process: subprocess.Popen[str], folder: str, minutes: float, every_s: float, fault: Callable[[int, Event], None]
) -> int:
    """Inject faults into a run until the time is over, and stop it; return the number of faults."""
    run = Folder(f"{folder}/goodput")
    with ThreadPoolExecutor(1) as pool:
        # From the beginning: a full pipe would block the driver.
        communication = pool.submit(process.communicate)
        try:
            count = inject_periodically(run, minutes, every_s, fault)
            request_stop(run, StopRequest(reason="enough"))
            output, _ = communication.result(timeout=120)
        finally:
            process.kill()
    if process.returncode:
        raise RuntimeError(f"the training failed:\n{output}")
    return count


def inject_periodically(run: Folder, minutes: float, every_s: float, fault: Callable[[int, Event], None]) -> int:
    """Call `fault` with its number and the `attempt_started` event every `every_s` of training; return the count."""
    await_training(run)
    began = time.time()
    count = 0
    for number in range(1, int(60 * minutes / every_s)):
        time.sleep(max(0.0, began + number * every_s - time.time()))
        # Skip a fault that fell due while workers started, instead of killing them as soon as they train.
        if time.time() < began + number * every_s + 1:
            fault(number, await_training(run))
            count += 1
    time.sleep(max(0.0, began + 60 * minutes - time.time()))
    return count


def await_training(run: Folder) -> Event:
    """Wait until the last attempt trains with all its ranks; return its `attempt_started` event."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        attempt = None
        trains = False
        for event in read_events(run):
            if event["event"] == "attempt_started":
                attempt, trains = event, False
            elif event["event"] in ("rank_failed", "group_failed"):
                trains = False
            elif event["event"] == "training":
                trains = True
        if attempt is not None and trains:
            return attempt
        time.sleep(0.1)
    raise TimeoutError("no attempt has trained for 300 s")


def share_while_training(report: GoodputReport) -> float:
    """Return the goodput without the time before the first attempt trains and after the last one ends."""
    once_s = sum(report.seconds[name] for name in _ONCE)
    return report.seconds["compute"] / (report.wall_s - once_s)
