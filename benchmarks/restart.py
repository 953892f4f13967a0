"""How long a killed worker costs: `headway fit` with two workers, against a bare TorchTrainer script that restarts.

From SIGKILL of the worker of rank 1 to the next step that any rank completes, each side in a Ray of its own.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import NamedTuple

from headway.orchestrator.events import Event, read_events
from headway.orchestrator.storage import Folder

from .table import Row, interleave, median_ratio

HERE = Path(__file__).parent
TARGET = 0.5
KILL_AT, STEPS, PAUSE_S = 75, 90, 0.2


class Stamp(NamedTuple):
    """A completed step of one rank."""

    time: float
    rank: int
    pid: int
    step: int
    began: float = 0.0


def stamps(file: Path) -> list[Stamp]:
    """What the ranks have written down; not the line that one is about to write."""
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [Stamp(float(each[0]), *map(int, each[1:4]), *map(float, each[4:])) for each in map(str.split, lines)]


def kill_in_the_middle(command: list[str], file: Path) -> tuple[float, Stamp]:
    """Starts a training, kills its rank 1 once that has made some steps; returns when, and the first step after."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        # Ray gives way to other processes (nice 15): on a busy machine that would be all one measures, on both sides.
        env={**environment, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"},
    )  # fmt: skip
    victim = None
    while victim is None and process.poll() is None:
        time.sleep(0.01)
        victim = next((each.pid for each in stamps(file) if (each.rank, each.step) == (1, KILL_AT)), None)
    before = {each.pid for each in stamps(file)}
    killed = time.time()
    if victim is not None:
        os.kill(victim, signal.SIGKILL)
    output, _ = process.communicate(timeout=300)
    again = [each for each in stamps(file) if each.pid not in before]
    if process.returncode or not again:
        raise RuntimeError(f"{' '.join(command)} failed:\n{output}")
    return killed, min(again)


def where_it_went(killed: float, resumed: Stamp, events: list[Event]) -> dict[str, float]:
    """The seconds of one restart of ours, by what happened in them."""
    when = {event["event"]: event for event in events if event["time"] > killed}
    started = when["attempt_started"]
    workers = started["workers"]
    marks = {
        "noticed": when["group_failed"]["time"],
        "processes there": max(resumed.began, when["group_failed"]["time"]),
        "function entered": max(worker["entered"] for worker in workers),
        "ranks met": started["time"],
        "restored": when["restored"]["time"],
        "data and hooks ready": when["training"]["time"],
        "first step": resumed.time,
    }
    spans, last = {}, killed
    for name, at in marks.items():
        spans[name], last = at - last, at
    return spans


def rows(pairs: int = 3) -> list[Row]:
    """Measures the row, and prints where our time went."""
    spans: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
        number = count()

        def ours() -> float:
            name = f"r{next(number)}"
            file = Path(folder, f"{name}.stamps")
            command = [
                sys.executable, "-m", "headway.orchestrator", "fit", str(HERE / "restart_headway.py"),
                "scaling.workers=2", f"config.stamps={file}", f"config.pause_s={PAUSE_S}", f"config.max_steps={STEPS}",
                "config.checkpoint.every=10 steps", f"storage={folder}", f"name={name}",
            ]  # fmt: skip
            killed, resumed = kill_in_the_middle(command, file)
            spans.append(where_it_went(killed, resumed, read_events(Folder(f"{folder}/{name}"))))
            return resumed.time - killed

        def theirs() -> float:
            name = f"b{next(number)}"
            file = Path(folder, f"{name}.stamps")
            script = [str(HERE / "restart_bare.py"), str(file), f"{folder}/{name}", str(STEPS), str(PAUSE_S)]
            killed, resumed = kill_in_the_middle([sys.executable, *script], file)
            return resumed.time - killed

        measured = interleave(ours, theirs, pairs=pairs)
    for name in spans[0]:
        print(f"  restart, until {name}: {statistics.median(each[name] for each in spans):.2f} s")
    ratio = median_ratio(measured)
    return [
        Row(
            "restart: worker killed to next step, 2 Ray workers",
            f"{statistics.median(each for each, _ in measured):.1f} s",
            f"{statistics.median(each for _, each in measured):.1f} s",
            ratio,
            f"<= {TARGET}",
            ratio <= TARGET,
        )
    ]
