"""The share of its time that a run puts into updates that count while a worker is killed every 30 seconds.

Two workers, updates of 200 ms, a checkpoint every 3 s. GOODPUT_MINUTES is how long workers are killed for: 10. The time
is that of the ledger (orchestrator/ledger.py), from the first update to the last kill's 30 s: what a run of weeks pays
once, its start and its end, is printed and left out.
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
    """The training, which goes on until it is told to stop."""
    return [
        sys.executable, "-m", "headway.orchestrator", "fit", str(HERE / "goodput_headway.py"), "name=goodput",
        f"storage={folder}", "scaling.workers=2", "config.step_s=0.2", "config.max_steps=1000000",
        "config.checkpoint.every=3s", "config.log_every=10 steps", "retries.max_failures=1000",
    ]  # fmt: skip


def kill_every_so_often(run: Folder, minutes: float) -> int:
    """Kills a worker that trains, in turn rank 1 and rank 0, every 30 s; returns how many."""
    await_training(run)
    began = time.time()
    kills = 0
    for number in range(1, int(60 * minutes / EVERY_S)):
        time.sleep(max(0.0, began + number * EVERY_S - time.time()))
        # A slot that has passed while workers came up is no debt: they would be killed as soon as they train.
        if time.time() < began + number * EVERY_S + 1:
            attempt = await_training(run)
            os.kill(attempt["workers"][number % 2]["pid"], signal.SIGKILL)
            kills += 1
    time.sleep(max(0.0, began + 60 * minutes - time.time()))
    return kills


def await_training(run: Folder) -> Event:
    """Returns the beginning of the last attempt once it trains and none of its ranks is known to be gone."""
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
    raise TimeoutError("no attempt trains")


def rows(minutes: float = float(os.environ.get("GOODPUT_MINUTES", "10"))) -> list[Row]:
    """Measures one run; prints its ledger."""
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
        process, run = start(command(folder)), Folder(f"{folder}/goodput")
        try:
            kills = kill_every_so_often(run, minutes)
            request_stop(run, StopRequest(reason="enough"))
            output, _ = process.communicate(timeout=120)
        finally:
            process.kill()
        if process.returncode:
            raise RuntimeError(f"the training failed:\n{output}")
        account = goodput_report(read_events(run))
    for name, seconds in account.seconds.items():
        print(f"  goodput, {name}: {seconds:.1f} s")
    print(f"  goodput, {kills} kills, {account.attempts} attempts, {account.steps_again} updates made again")
    share = share_while_training(account)
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


def share_while_training(account: GoodputReport) -> float:
    """The updates that counted by all the time but that before the first attempt trains and after the last one."""
    once_s = sum(account.seconds[name] for name in _ONCE)
    return account.seconds["compute"] / (account.wall_s - once_s)
