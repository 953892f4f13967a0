"""Time to the first step: `headway fit` with two workers, compared with a bare TorchTrainer script.

The split: until `fit` is called (imports in the driver), until the training function begins on rank 0 (checks, Ray, the
workers and their imports), and until its first step is complete.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path

from headway.orchestrator.storage.events import read_events
from headway.orchestrator.storage.folder import Folder

from .table import Row, interleave, median_ratio

HERE = Path(__file__).parent
TARGET = 1.0
PARTS = ("imports of the driver", "checks, Ray, workers", "the first step")


def run(command: list[str]) -> float:
    """Run a command to its end, and return when it began."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    began = time.time()
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**environment, "RAY_USAGE_STATS_ENABLED": "0"}
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    return began


def split(*marks: float) -> tuple[float, ...]:
    """Return the seconds between successive marks."""
    return tuple(after - before for before, after in zip(marks, marks[1:], strict=False))


def rows(pairs: int = 5) -> list[Row]:
    """Measure the start, and print its parts."""
    parts: dict[str, list[tuple[float, ...]]] = {"ours": [], "theirs": []}
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
        stamps, number = Path(folder, "stamps"), count()

        def ours() -> float:
            name = f"r{next(number)}"
            settings = [f"config.stamp={stamps}", "config.max_steps=16", f"storage={folder}", f"name={name}"]
            target = str(HERE / "start_headway.py")
            began = run([sys.executable, "-m", "headway.orchestrator", "fit", target, "scaling.workers=2", *settings])
            events = {each["event"]: each for each in read_events(Folder(f"{folder}/{name}"))}
            entered = events["attempt_started"]["workers"][0]["entered"]
            parts["ours"].append(split(began, events["driver_started"]["since"], entered, float(stamps.read_text())))
            return sum(parts["ours"][-1])

        def theirs() -> float:
            stamps.unlink(missing_ok=True)
            began = run([sys.executable, str(HERE / "start_bare.py"), str(stamps), folder])
            parts["theirs"].append(split(began, *map(float, stamps.read_text().split())))
            return sum(parts["theirs"][-1])

        measured = interleave(ours, theirs, pairs=pairs)
    print("  start, the ratios of the pairs:", *(f"{mine / bare:.3f}" for mine, bare in measured))
    ratio = median_ratio(measured)
    found = [_row("start: command to first step, 2 Ray workers", measured, ratio, f"<= {TARGET}", ratio <= TARGET)]
    for part, name in enumerate(PARTS):
        pair = [(mine[part], bare[part]) for mine, bare in zip(parts["ours"], parts["theirs"], strict=True)]
        found.append(_row(f"  of which {name}", pair, median_ratio(pair), "", True))
    return found


def _row(name: str, measured: list[tuple[float, float]], ratio: float, target: str, ok: bool) -> Row:
    ours, theirs = (f"{statistics.median(side):.1f} s" for side in zip(*measured, strict=True))
    return Row(name, ours, theirs, ratio, target, ok)
