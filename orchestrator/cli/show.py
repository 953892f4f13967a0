"""Runs and sweeps as text and JSON documents, from their files. Imports neither torch nor Ray."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from headway.trainer.metrics.units import human_duration

from ..display.tables import format_table, local_time
from ..runs.goodput import GoodputReport, goodput_report_of
from ..runs.run import SWEEP_RECORD, Record, Run, find_run
from ..storage.events import Event, describe, read_events
from ..storage.folder import Folder, absolute, join
from ..sweeps.record import Sweep, TrialResult
from ..sweeps.result import SweepResult
from .run_list import format_elapsed

_SHOWN_EVENTS = {
    "attempt_started",
    "restored",
    "set_up",
    "group_failed",
    "preemption_notice",
    "resized",
    "checkpoint_saved",
    "checkpoint_failed",
    "evaluation_failed",
    "out_of_memory",
    "stop_requested",
    "attempt_ended",
}


def run_summary(run: Run) -> dict[str, Any]:
    """Return a run as in `runs ls --json`."""
    record = run.record
    names = (
        "name", "id", "trainer", "workers", "attempts", "steps", "epochs", "samples", "tokens", "metrics", "error",
        "created", "started", "ended", "last_checkpoint", "best_checkpoint", "best_metric", "best_step",
    )  # fmt: skip
    return {**{name: getattr(record, name) for name in names}, **_state(run)}


def sweep_summary(sweep: Sweep) -> dict[str, Any]:
    """Return a sweep as in `runs ls --json`."""
    record, search = sweep.record, sweep.record.search
    return {
        "name": record.name, "id": record.id, "status": sweep.status, "reason": record.reason,
        "metric": search["metric"], "mode": search["mode"], "trials": record.trials,
        "ended_trials": sum(trial.has_ended for trial in sweep.trials()), "created": record.created,
        "started": record.started, "ended": record.ended, "sweep_dir": sweep.sweep_dir,
    }  # fmt: skip


def run_document(name: str, storage: str) -> tuple[str, dict[str, Any]]:
    """Return the kind and content of `runs show --json`.

    Raises:
        ConfigError: there is no such run.
    """
    if (result := _sweep_result(name, storage)) is not None:
        best = result.best
        return "sweep", {
            "sweep": {
                "name": name, "status": result.status, "reason": result.reason, "metric": result.metric,
                "mode": result.mode, "best": best.name if best else None, "sweep_dir": result.sweep_dir,
                "trials": [_trial(each) for each in result.trials],
            }
        }  # fmt: skip
    # Imported here because it imports pydantic.
    from ..config.coerce import parse_yaml, resolve_scalars

    run = find_run(name, storage)
    goodput = goodput_report_of(run)
    return "run", {
        "run": {**run.record.to_plain(), **_state(run)},
        "time": {**asdict(goodput), "goodput": goodput.goodput},
        "config": resolve_scalars(parse_yaml(run.folder.read("config.yaml") or "") or {}),
        "events": read_events(run.folder),
    }


def print_run(name: str, storage: str) -> None:
    """Print the record, time and events of a run, or the trials of a sweep.

    Raises:
        ConfigError: there is no such run.
    """
    if (result := _sweep_result(name, storage)) is not None:
        _print_sweep(result)
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
        "started": f"{local_time(record.started)}, took {format_elapsed(run)}",
        **dict(_processes(run, events)),
        "trainer": f"{record.trainer} with {_count(record.workers, 'worker')}{_elastic_range(record)}",
        "files": run.run_dir,
        "checkpoint": record.last_checkpoint,
        "best": record.best_checkpoint,
        "command": " ".join(record.command),
        "versions": "  ".join(f"{package} {version}" for package, version in record.versions.items()),
        "git": f"{record.git['commit']}{' with changes' if record.git['dirty'] else ''}" if record.git else None,
        "machine": "  ".join(f"{key} {value}" for key, value in record.hardware.items()),
        "changes": f"\n{'':<11}".join(record.all_changes()),
    }
    for label, fact in facts.items():
        if fact:
            print(f"{label:<11}{fact}")
    _print_goodput(goodput_report_of(run))
    print("\nconfig")
    for line in (run.folder.read("config.yaml") or "").splitlines():
        print(f"  {line}")
    print("\nevents")
    for event in events:
        if event["event"] in _SHOWN_EVENTS:
            at = datetime.fromtimestamp(event["time"]).strftime("%H:%M:%S")
            print(f"  {at}  {event['event'].replace('_', ' ')}: {describe(event)}")


def print_comparison(first: str, second: str, differences: Sequence[Sequence[str]]) -> None:
    """Print the differences between two runs, as `compare_runs` returns them."""
    if not differences:
        print(f"{first} and {second} have no recorded differences")
        return
    rows = [("OF", "FIELD", first, second), *(tuple(" ".join(cell.split()) for cell in row) for row in differences)]
    print(format_table(rows))


def _sweep_result(name: str, storage: str) -> SweepResult | None:
    place = join(absolute(storage), name)
    return SweepResult.read(place) if Folder(place).exists(SWEEP_RECORD) else None


def _print_sweep(result: SweepResult) -> None:
    print(f"{result.sweep_dir}: {result.status}" + (f" ({result.reason})" if result.reason else ""))
    if (best := result.best) is not None:
        print(f"best: {best.name}  {result.metric} {best.metric:.4g}  {best.checkpoint}")
    print(f"\n{result.table.text()}" if result.trials else "no trials yet")


def _print_goodput(report: GoodputReport) -> None:
    if report.wall_s <= 0:
        return
    starts = f"{_count(report.starts, 'start')} and {_count(report.attempts, 'attempt')}"
    print(f"\ntime: {human_duration(report.wall_s)} in {starts}")
    for name, seconds in sorted(report.seconds.items(), key=lambda each: -each[1]):
        if seconds >= 0.05:
            print(f"  {name:<22}{100 * report.share(name):5.1f} %{seconds:12,.1f} s")
    if report.not_running_s >= 0.05:
        print(f"  {'not running':<22}{'':7}{report.not_running_s:12,.1f} s (not counted)")
    print(f"goodput    {100 * report.goodput:.1f} % of the time went into updates that counted")
    print(f"fix first  {report.advice()}")


def _state(run: Run) -> dict[str, Any]:
    # The record of a run whose driver died still says "running".
    return {"status": run.status, "reason": run.reason, "run_dir": run.run_dir}


def _trial(trial: TrialResult) -> dict[str, Any]:
    names = (
        "name", "index", "status", "reason", "error", "values", "metric", "steps", "metrics", "run_dir",
        "best_checkpoint", "last_checkpoint",
    )  # fmt: skip
    return {name: getattr(trial, name) for name in names}


def _processes(run: Run, events: Sequence[Event]) -> Iterator[tuple[str, str]]:
    """Yield the driver and the ranks of a running run, as facts."""
    if run.status == "running":
        yield "driver", f"process {run.record.driver.pid} on {run.record.driver.host}"
        for worker in next((each["workers"] for each in reversed(events) if each["event"] == "attempt_started"), ()):
            yield f"rank {worker['rank']}", f"process {worker['pid']} on {worker['host']}"


def _elastic_range(record: Record) -> str:
    is_elastic = record.min_workers < record.max_workers
    return f", of {record.min_workers} to {record.max_workers} workers" if is_elastic else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
