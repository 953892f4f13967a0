"""The runs of a storage as a table. Needs neither torch nor Ray, for which nobody wants to wait who looks around."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from datetime import datetime

from headway.trainer.callbacks.progress_bar import human_duration

from ..runs.run import Run, list_runs
from ..storage.folder import absolute
from ..sweeps.record import list_sweeps


def print_runs(storage: str) -> None:
    """Prints the runs of a storage, and a line for each of its sweeps."""
    runs, sweeps = list_runs(storage), list_sweeps(storage)
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
    """Returns a table, as wide as it must be: names are there to be copied.

    Args:
        rows: the first one has the headings.
        right: headings of the columns whose cells end where the column does.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [f"{{:{'>' if heading in right else '<'}{width}}}" for heading, width in zip(rows[0], widths, strict=True)]
    line = "  ".join(cells)
    return "\n".join(line.format(*row).rstrip() for row in rows)


def took(run: Run) -> str:
    """Returns how long the last start of a run took, or has taken so far, for people."""
    started = datetime.fromisoformat(run.record.started).timestamp()
    if run.record.ended:
        return human_duration(datetime.fromisoformat(run.record.ended).timestamp() - started)
    until = time.time() if run.status == "running" else run.record.driver.heartbeat
    return human_duration(until - started)


def local_time(iso: str) -> str:
    """Returns a time of a record as clocks here show it."""
    return datetime.fromisoformat(iso).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _row(run: Run) -> tuple[str, ...]:
    record = run.record
    loss = record.metrics.get("validation/loss", record.metrics.get("train/loss"))
    return (
        record.name, run.status, f"{record.steps:,}", "" if loss is None else f"{loss:.4g}", str(record.attempts),
        local_time(record.started), took(run),
    )  # fmt: skip
