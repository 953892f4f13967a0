"""Time to the first step: `headway fit` with two workers, compared with a bare TorchTrainer script."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .table import Row, interleave, median_ratio

HERE = Path(__file__).parent
TARGET = 1.15


def first_step_s(command: list[str], stamp: Path) -> float:
    """Run a command; return the seconds to its first completed step, whose time it writes to `stamp`."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    began = time.time()
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**environment, "RAY_USAGE_STATS_ENABLED": "0"}
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    return float(stamp.read_text()) - began


def rows(pairs: int = 5) -> list[Row]:
    """Measure the row."""
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
        stamp, number = Path(folder, "stamp"), iter(range(1000))

        def ours() -> float:
            settings = [f"config.stamp={stamp}", "config.max_steps=16", f"storage={folder}", f"name=r{next(number)}"]
            target = str(HERE / "start_headway.py")
            command = [sys.executable, "-m", "headway.orchestrator", "fit", target, "scaling.workers=2", *settings]
            return first_step_s(command, stamp)

        def theirs() -> float:
            return first_step_s([sys.executable, str(HERE / "start_bare.py"), str(stamp), folder], stamp)

        measured = interleave(ours, theirs, pairs=pairs)
    ratio = median_ratio(measured)
    return [
        Row(
            "start: command to first step, 2 Ray workers",
            f"{statistics.median(each for each, _ in measured):.1f} s",
            f"{statistics.median(each for _, each in measured):.1f} s",
            ratio,
            f"<= {TARGET}",
            ratio <= TARGET,
        )
    ]
