"""Runs as pages for the terminal. Reads the files of the runs, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from rich.console import Console

from headway.trainer.callbacks.progress_bar import human_duration

from ..runs.compare import compare_runs
from ..runs.goodput import GoodputReport, goodput_report_of
from ..runs.run import SWEEP_RECORD, Record, Run, find_run
from ..storage.events import Event, describe, read_events
from ..storage.folder import Folder, absolute, join
from ..sweeps.result import SweepResult
from .tables import format_table, local_time, took

_SHOWN_EVENTS = {
    "attempt_started",
    "restored",
    "set_up",
    "group_failed",
    "preemption_notice",
    "resized",
    "checkpoint_saved",
    "checkpoint_failed",
    "out_of_memory",
    "stop_requested",
    "attempt_ended",
}


def print_run(name: str, storage: str, console: Console | None = None) -> None:
    """Prints all that is known of one run, or the trials of a sweep."""
    console = console or Console(highlight=False, soft_wrap=True)
    if Folder(join(absolute(storage), name)).exists(SWEEP_RECORD):
        _print_sweep(SweepResult.read(join(absolute(storage), name)), console)
        return
    run = find_run(name, storage)
    record = run.record
    events = read_events(run.folder)
    facts = {
        "run": f"{record.name} ({record.id})",
        "status": run.status + (f": {run.reason}" if run.reason else ""),
        "error": record.error,
        "steps": f"{record.steps:,} in {record.epochs:,} epochs and {_count(record.attempts, 'attempt')}",
        "metrics": "  ".join(f"{name} {value:.4g}" for name, value in record.metrics.items()),
        "started": f"{local_time(record.started)}, took {took(run)}",
        **dict(_processes(run, events)),
        "trainer": f"{record.trainer} with {_count(record.workers, 'worker')}{_of(record)}",
        "files": run.run_dir,
        "checkpoint": record.last_checkpoint,
        "best": record.best_checkpoint,
        "command": " ".join(record.command),
        "versions": "  ".join(f"{package} {version}" for package, version in record.versions.items()),
        "git": f"{record.git['commit']}{' with changes' if record.git['dirty'] else ''}" if record.git else None,
        "machine": "  ".join(f"{key} {value}" for key, value in record.hardware.items()),
    }
    for label, fact in facts.items():
        if fact:
            console.print(f"{label:<11}{fact}", markup=False)
    _print_ledger(goodput_report_of(run), console)
    console.print("\nconfig", markup=False)
    console.print(
        "".join(f"  {line}\n" for line in (run.folder.read("config.yaml") or "").splitlines()), markup=False, end=""
    )
    console.print("\nevents", markup=False)
    for event in events:
        if event["event"] in _SHOWN_EVENTS:
            at = datetime.fromtimestamp(event["time"]).strftime("%H:%M:%S")
            console.print(f"  {at}  {event['event'].replace('_', ' ')}: {describe(event)}", markup=False)


def _print_sweep(result: SweepResult, console: Console) -> None:
    console.print(
        f"{result.sweep_dir}: {result.status}" + (f" ({result.reason})" if result.reason else ""), markup=False
    )
    if (best := result.best) is not None:
        console.print(f"best: {best.name}  {result.metric} {best.metric:.4g}  {best.checkpoint}", markup=False)
    console.print(f"\n{result.table.text()}" if result.trials else "no trials yet", markup=False)


def print_comparison(first: str, second: str, storage: str, console: Console | None = None) -> None:
    """Prints what two runs differ in."""
    console = console or Console(highlight=False)
    found = compare_runs(first, second, storage)
    if not found:
        console.print(f"{first} and {second} differ in nothing that is recorded", markup=False)
        return
    # As wide as it must be: what is piped into another program must not be cut.
    rows = [("OF", "FIELD", first, second), *(tuple(" ".join(cell.split()) for cell in row) for row in found)]
    console.print(format_table(rows), markup=False, soft_wrap=True)


def _print_ledger(account: GoodputReport, console: Console) -> None:
    if account.wall_s <= 0:
        return
    starts = f"{_count(account.starts, 'start')} and {_count(account.attempts, 'attempt')}"
    console.print(f"\ntime: {human_duration(account.wall_s)} in {starts}", markup=False)
    for name, seconds in sorted(account.seconds.items(), key=lambda each: -each[1]):
        if seconds >= 0.05:
            console.print(f"  {name:<22}{100 * account.share(name):5.1f} %{seconds:12,.1f} s", markup=False)
    if account.not_running_s >= 0.05:
        console.print(f"  {'not running':<22}{'':7}{account.not_running_s:12,.1f} s, besides", markup=False)
    console.print(f"goodput    {100 * account.goodput:.1f} % of the time went into updates that counted", markup=False)
    console.print(f"fix first  {account.advice()}", markup=False)


def _processes(run: Run, events: Sequence[Event]) -> Iterator[tuple[str, str]]:
    """The processes of a run that is going on."""
    if run.status == "running":
        yield "driver", f"process {run.record.driver.pid} on {run.record.driver.host}"
        for worker in next((each["workers"] for each in reversed(events) if each["event"] == "attempt_started"), ()):
            yield f"rank {worker['rank']}", f"process {worker['pid']} on {worker['host']}"


def _of(record: Record) -> str:
    is_elastic = record.min_workers < record.max_workers
    return f", of {record.min_workers} to {record.max_workers} workers" if is_elastic else ""


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
