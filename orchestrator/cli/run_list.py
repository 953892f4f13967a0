"""The list of the runs of a storage. Imports neither torch nor Ray, so it is fast."""

from __future__ import annotations

import time
from datetime import datetime
from typing import TYPE_CHECKING

from headway.trainer.metrics.units import human_duration

from ..display.tables import format_table, local_time

if TYPE_CHECKING:
    from ..runs.run import Run
    from ..sweeps.record import Sweep


def runs_and_sweeps(storage: str) -> tuple[list[Run], list[Sweep]]:
    """Return the runs and the sweeps of a storage, each last started first."""
    from ..runs.run import list_folders, list_runs
    from ..sweeps.record import Sweep

    runs = list_runs(storage)
    return runs, list_folders(Sweep, storage, but={run.folder.name for run in runs})


def print_runs(storage: str) -> None:
    """Print the runs of a storage, and a line for each of its sweeps."""
    from ..storage.folder import absolute

    runs, sweeps = runs_and_sweeps(storage)
    for sweep in sweeps:
        ended = sum(trial.has_ended for trial in sweep.trials())
        name = sweep.record.name
        print(f"{name}: a sweep, {sweep.status}, {ended} of {sweep.record.trials} trials; `headway runs show {name}`")
    if runs:
        rows = [("NAME", "STATUS", "STEPS", "LOSS", "ATTEMPTS", "STARTED", "TOOK"), *map(_row, runs)]
        print(format_table(rows, right=("STEPS", "LOSS", "ATTEMPTS", "TOOK")))
    elif not sweeps:
        print(f"no runs of `headway fit` in {absolute(storage)}")


def format_elapsed(run: Run) -> str:
    """Return how long the last start of a run took, or has taken so far."""
    started = datetime.fromisoformat(run.record.started).timestamp()
    if run.record.ended:
        return human_duration(datetime.fromisoformat(run.record.ended).timestamp() - started)
    until = time.time() if run.status == "running" else run.record.driver.heartbeat
    return human_duration(until - started)


def _row(run: Run) -> tuple[str, ...]:
    record = run.record
    loss = record.metrics.get("validation/loss", record.metrics.get("train/loss"))
    return (
        record.name, run.status, f"{record.steps:,}", "" if loss is None else f"{loss:.4g}", str(record.attempts),
        local_time(record.started), format_elapsed(run),
    )  # fmt: skip
