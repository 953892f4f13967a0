"""The cost of a lost worker: the time until a killed one is replaced, and until a stopped one is named.

Killed: from SIGKILL of rank 1 to the next step that any rank completes. `headway fit` with two workers is compared with
a bare TorchTrainer script that restarts; each starts its own Ray. The kill comes 40 s after the first step, so that
Headway has started its standby processes, as it has in a real run, which fails after hours.
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

from headway.orchestrator.storage.events import Event, read_events
from headway.orchestrator.storage.folder import Folder

from .table import Row, interleave, median_ratio

HERE = Path(__file__).parent
TARGET = 0.5
STOPS = 3
KILL_AT, STEPS, PAUSE_S = 205, 220, 0.2


class Stamp(NamedTuple):
    """A completed step of one rank. `began`: when its process started; 0.0 if unknown."""

    time: float
    rank: int
    pid: int
    step: int
    began: float = 0.0


def stamps(file: Path) -> list[Stamp]:
    """Return the steps that the ranks have written, without a line that is not yet complete."""
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [Stamp(float(each[0]), *map(int, each[1:4]), *map(float, each[4:])) for each in map(str.split, lines)]


def start(command: list[str], **variables: str) -> subprocess.Popen[str]:
    """Start a training with these environment variables.

    Ray workers get normal priority instead of nice 15, which on a busy machine would dominate.
    """
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**environment, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", **variables},
    )  # fmt: skip


def await_step(process: subprocess.Popen[str], file: Path, step: int) -> int:
    """Wait until rank 1 has completed `step`; return the id of its process."""
    while process.poll() is None:
        for each in stamps(file):
            if each.rank == 1 and each.step >= step:
                return each.pid
        time.sleep(0.01)
    raise RuntimeError(f"the training ended before step {step}:\n{process.communicate()[0]}")


def finish(process: subprocess.Popen[str]) -> None:
    """Wait until a training ends; raise if it failed."""
    output, _ = process.communicate(timeout=300)
    if process.returncode:
        raise RuntimeError(f"the training failed:\n{output}")


def kill_in_the_middle(command: list[str], file: Path) -> tuple[float, Stamp]:
    """Start a training and kill rank 1 at step KILL_AT; return the time of the kill and the next completed step."""
    process = start(command)
    victim = await_step(process, file, KILL_AT)
    before = {each.pid for each in stamps(file)}
    killed = time.time()
    os.kill(victim, signal.SIGKILL)
    finish(process)
    return killed, min(each for each in stamps(file) if each.pid not in before)


def restart_phases(killed: float, resumed: Stamp, events: list[Event]) -> dict[str, float]:
    """Return the seconds of each phase of one restart."""
    when = {event["event"]: event for event in events if event["time"] > killed}
    started = when["attempt_started"]
    workers = started["workers"]
    marks = {
        "noticed": when["group_failed"]["time"],
        "processes started": max(resumed.began, when["group_failed"]["time"]),
        "function entered": max(worker["entered"] for worker in workers),
        "ranks connected": started["time"],
        "restored": when["restored"]["time"],
        "data and hooks ready": when["training"]["time"],
        "first step": resumed.time,
    }
    spans, last = {}, killed
    for name, at in marks.items():
        spans[name], last = at - last, at
    return spans


def fit_command(folder: str, name: str) -> tuple[list[str], Path]:
    """Return the command of a run, and the file to which its ranks append their steps."""
    file = Path(folder, f"{name}.stamps")
    return [
        sys.executable, "-m", "headway.orchestrator", "fit", str(HERE / "restart_headway.py"),
        "scaling.workers=2", f"config.stamps={file}", f"config.pause_s={PAUSE_S}", f"config.max_steps={STEPS}",
        "config.checkpoint.every=10 steps", f"storage={folder}", f"name={name}",
    ], file  # fmt: skip


def restarts(folder: str, pairs: int) -> Row:
    """Measure restarts after a kill, and print the phases of Headway's."""
    spans: list[dict[str, float]] = []
    number = count()

    def ours() -> float:
        name = f"r{next(number)}"
        killed, resumed = kill_in_the_middle(*fit_command(folder, name))
        spans.append(restart_phases(killed, resumed, read_events(Folder(f"{folder}/{name}"))))
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
    return Row(
        "restart: worker killed to next step, 2 Ray workers",
        f"{statistics.median(each for each, _ in measured):.1f} s",
        f"{statistics.median(each for _, each in measured):.1f} s",
        ratio,
        f"<= {TARGET}",
        ratio <= TARGET,
    )


def detection(folder: str) -> Row:
    """Measure the time from SIGSTOP to the event that names the late rank; the slowest of several."""
    command, file = fit_command(folder, "stopped")
    process, events = start(command), Folder(f"{folder}/stopped")
    seconds = []
    for number in range(STOPS):
        victim = await_step(process, file, (number + 1) * STEPS // (STOPS + 1))
        stopped = time.time()
        os.kill(victim, signal.SIGSTOP)
        named: list[Event] = []
        while not named and process.poll() is None:
            time.sleep(0.02)
            found = (each for each in read_events(events) if each["time"] >= stopped)
            named = [each for each in found if each["event"] in ("rank_late", "rank_hung")]
        os.kill(victim, signal.SIGCONT)
        if [each["ranks"] for each in named] != [[1]]:
            raise RuntimeError(f"rank 1 was stopped, but the events are {named}")
        seconds.append(named[0]["time"] - stopped)
    finish(process)
    ended = sorted(each.time for each in stamps(file) if each.rank == 0)
    usual_s = statistics.median(later - earlier for earlier, later in zip(ended, ended[1:], strict=False))
    limit_s = max(5.0, 5 * usual_s)
    return Row(
        "watchdog: SIGSTOP to naming the rank",
        f"{max(seconds):.1f} s",
        f"{limit_s:.1f} s",
        max(seconds) / limit_s,
        "<= 1",
        max(seconds) <= limit_s,
    )


def rows(pairs: int = 3) -> list[Row]:
    """Measure all rows."""
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
        return [restarts(folder, pairs), detection(folder)]
