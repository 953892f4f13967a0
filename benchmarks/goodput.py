"""Goodput while a worker is killed every 30 seconds: the share of time spent on updates that count.

Two workers, updates of 200 ms, a checkpoint every 3 s, kills for GOODPUT_MINUTES (default 10). The times are those of
orchestrator/runs/goodput.py, from the first update until 30 s after the last kill. The start and the end of the run are
printed but not included, because a run of weeks pays for them once.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from headway.orchestrator.runs.goodput import GoodputReport, goodput_report
from headway.orchestrator.runs.requests import StopRequest, request_stop
from headway.orchestrator.storage.events import Event, read_events
from headway.orchestrator.storage.folder import Folder

from .restart import start
from .table import Row

HERE = Path(__file__).parent
TARGET = 0.7
EVERY_S = 30.0
_ONCE = ("waiting for machines", "starting", "importing", "ending")


def command(folder: str) -> list[str]:
    """Return the command of a run that trains until it is stopped."""
    return [
        sys.executable, "-m", "headway.orchestrator", "fit", str(HERE / "goodput_headway.py"), "name=goodput",
        f"storage={folder}", "scaling.workers=2", "config.step_s=0.2", "config.max_steps=1000000",
        "config.checkpoint.every=3s", "config.log_every=10 steps", "retries.max_failures=1000",
    ]  # fmt: skip


def kill_periodically(run: Folder, minutes: float) -> int:
    """Kill rank 1 and rank 0 alternately, every 30 s of training; return the number of kills."""
    await_training(run)
    began = time.time()
    kills = 0
    for number in range(1, int(60 * minutes / EVERY_S)):
        time.sleep(max(0.0, began + number * EVERY_S - time.time()))
        # Skip a kill that fell due while workers started, instead of killing them as soon as they train.
        if time.time() < began + number * EVERY_S + 1:
            attempt = await_training(run)
            os.kill(attempt["workers"][number % 2]["pid"], signal.SIGKILL)
            kills += 1
    time.sleep(max(0.0, began + 60 * minutes - time.time()))
    return kills


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


def rows(minutes: float = float(os.environ.get("GOODPUT_MINUTES", "10"))) -> list[Row]:
    """Measure one run, and print where its time went."""
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
        process, run = start(command(folder)), Folder(f"{folder}/goodput")
        try:
            kills = kill_periodically(run, minutes)
            request_stop(run, StopRequest(reason="enough"))
            output, _ = process.communicate(timeout=120)
        finally:
            process.kill()
        if process.returncode:
            raise RuntimeError(f"the training failed:\n{output}")
        report = goodput_report(read_events(run))
    for name, seconds in report.seconds.items():
        print(f"  goodput, {name}: {seconds:.1f} s")
    print(f"  goodput, {kills} kills, {report.attempts} attempts, {report.steps_again} updates repeated")
    share = share_while_training(report)
    return [
        Row(
            f"goodput: a worker killed every {EVERY_S:.0f} s for {minutes:g} min, 2 Ray workers",
            f"{100 * share:.0f} %",
            f"{100 * TARGET:.0f} %",
            share / TARGET,
            ">= 1",
            share >= TARGET,
        )
    ]


def share_while_training(report: GoodputReport) -> float:
    """Return the goodput without the time before the first attempt trains and after the last one ends."""
    once_s = sum(report.seconds[name] for name in _ONCE)
    return report.seconds["compute"] / (report.wall_s - once_s)
