"""Text tables, and the list of the runs of a storage. Imports neither torch nor Ray, so it is fast."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from headway.trainer.metrics.units import human_duration

if TYPE_CHECKING:
    from ..runs.run import Run
    from ..sweeps.record import Sweep


def runs_and_sweeps(storage: str) -> tuple[list[Run], list[Sweep]]:
    """Return the runs and the sweeps of a storage, each last started first."""
    from ..runs.run import list_runs
    from ..sweeps.record import list_sweeps

    runs = list_runs(storage)
    return runs, list_sweeps(storage, but={run.folder.name for run in runs})


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
        print(f"no runs in {absolute(storage)}")


def format_table(rows: Sequence[Sequence[str]], *, right: Collection[str] = ()) -> str:
    """Return rows as aligned text. Cells are never shortened, so that names can be copied and output piped.

    Args:
        rows: the first one has the headings.
        right: headings of the columns that are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [f"{{:{'>' if heading in right else '<'}{width}}}" for heading, width in zip(rows[0], widths, strict=True)]
    line = "  ".join(cells)
    return "\n".join(line.format(*row).rstrip() for row in rows)


def format_elapsed(run: Run) -> str:
    """Return how long the last start of a run took, or has taken so far."""
    started = datetime.fromisoformat(run.record.started).timestamp()
    if run.record.ended:
        return human_duration(datetime.fromisoformat(run.record.ended).timestamp() - started)
    until = time.time() if run.status == "running" else run.record.driver.heartbeat
    return human_duration(until - started)


def local_time(moment: str | float) -> str:
    """Return a time (ISO 8601, or seconds since 1970) in the local time zone."""
    at = datetime.fromisoformat(moment).astimezone() if isinstance(moment, str) else datetime.fromtimestamp(moment)
    return at.strftime("%Y-%m-%d %H:%M:%S")


def _row(run: Run) -> tuple[str, ...]:
    record = run.record
    loss = record.metrics.get("validation/loss", record.metrics.get("train/loss"))
    return (
        record.name, run.status, f"{record.steps:,}", "" if loss is None else f"{loss:.4g}", str(record.attempts),
        local_time(record.started), format_elapsed(run),
    )  # fmt: skip
