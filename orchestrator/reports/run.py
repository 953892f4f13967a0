"""`headway report`: one self-contained HTML file about a run or a sweep, made from its files."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headway.trainer.errors import ConfigError
from headway.trainer.metrics.units import human_bytes, human_duration
from headway.trainer.trackers.jsonl import read_records

from ..config.coerce import parse_yaml
from ..config.loader import differences
from ..runs.checkpoints import RunCheckpoints
from ..runs.goodput import CLASSES, GoodputReport, goodput_report_of
from ..runs.run import SWEEP_RECORD, Run, find_run
from ..storage.events import Event, describe, read_events
from ..storage.folder import Folder, absolute, join
from ..sweeps.result import SweepResult
from . import charts
from .charts import Line
from .html import Html, details, element, escaped, facts, joined, note, page, section, table
from .sweep import sweep_body

REPORT = "report.html"
_NO_METRICS = {"step", "epoch", "time", "attempt", "elapsed_s", "tokens"}
_SPEED = ("samples_per_s", "tokens_per_s", "step_s", "data_wait", "paused_s", "mfu")
_MOST_FIGURES = 40
_MOST_EVENTS = 300
# Shown elsewhere on the page, or too many.
_HIDDEN_EVENTS = {"checkpoint_saved", "evaluated", "last_heard", "message", "rank_failed", "training"}
_COLORS = dict(
    zip(
        CLASSES,
        ("#1a7f37", "#8c959f", "#afb8c1", "#d0d7de", "#8250df", "#d9480f", "#bf8700", "#0969da", "#54aeff", "#cf222e",
         "#a40e26", "#ff8182", "#eac54f"),
        strict=True,
    )
)  # fmt: skip


def write_report(name: str, storage: str = "runs", output: str | None = None) -> str:
    """Write one HTML file about a run or a sweep in its current state, and return its path.

    Needs neither Ray nor the training code. The file is self-contained and needs no network.

    Args:
        name: name of the run or sweep; `sweep/trial-000` for a trial.
        storage: folder or URI that holds it.
        output: path of the file; by default `report.html` in the folder of the run or sweep.

    Raises:
        ConfigError: there is no such run, or plotly is not installed.
        StorageError: the file cannot be written.
    """
    library = charts.library()
    folder = Folder(join(absolute(storage), name))
    if folder.exists(SWEEP_RECORD):
        body = sweep_body(SweepResult.read(folder.place))
    else:
        body = _run_body(find_run(name, storage), name, storage)
    written = note(
        f"Written by headway report at {_utc(datetime.now(UTC).timestamp())}. Drag in a figure to zoom, double-click "
        "to zoom out."
    )
    text = page(name, joined([body, written]), library=library, last=charts.ZOOM)
    if output is None:
        folder.write(REPORT, text)
        return folder.path(REPORT)
    try:
        Path(output).write_text(text)
    except OSError as error:
        raise ConfigError(f"the report cannot be written to {output}: {error}") from error
    return absolute(output)


def _run_body(run: Run, name: str, storage: str) -> Html:
    record, events = run.record, read_events(run.folder)
    account = goodput_report_of(run)
    return joined([
        _head(run, account),
        _metrics(run, events),
        _time(account),
        _attempts(events),
        _checkpoints(name, storage),
        _configuration(run),
        section(
            "Where it comes from",
            facts({
                "command": " ".join(record.command), "working directory": record.working_dir,
                "git": f"{record.git['commit']}{' with changes' if record.git['dirty'] else ''}" if record.git else "",
                "trainer": record.trainer, "its file, SHA-256": record.code.get("sha256"),
                "training data": record.data.get("fingerprint"),
                "machine": _pairs(record.hardware), "versions": _pairs(record.versions),
            }),
        ),
        _events(events),
    ])  # fmt: skip


def _head(run: Run, account: GoodputReport) -> Html:
    record = run.record
    measured = sorted(record.metrics.items(), key=lambda each: ("loss" not in each[0], each[0]))
    metrics = {name: charts.shown(float(value)) for name, value in measured if "/" in name}
    best = "" if record.best_metric is None else f"{charts.shown(record.best_metric)} at step {record.best_step:,}"
    elastic = f", of {record.min_workers} to {record.max_workers}" if record.min_workers < record.max_workers else ""
    status = element("span", run.status.replace("_", " "), class_=f"status {run.status}")
    return joined([
        element("h1", Html(f"{escaped(record.name)} {status}")),
        element("p", run.reason) if run.reason else Html(""),
        element("p", record.error, class_="error") if record.error else Html(""),
        facts({
            "steps": f"{record.steps:,}", "epochs": f"{record.epochs:,}", "samples": f"{record.samples:,}",
            "tokens": f"{record.tokens:,}" if record.tokens else "", "metrics": _pairs(metrics), "best": best,
            "started": _utc_of(record.created), "ended": _utc_of(record.ended) if record.ended else "",
            "time": _starts(account), "workers": f"{record.workers}{elastic}",
            "preemptions": record.preemptions or "", "failures": record.failures or "",
            "resume guarantee": record.data_guarantee, "files": run.run_dir, "id": record.id,
            "changed between starts": joined([element("div", each) for each in record.all_changes()]),
        }),
    ])  # fmt: skip


def _metrics(run: Run, events: Sequence[Event]) -> Html:
    records = read_records(run.folder.path("metrics.jsonl"))
    series: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for record in records:
        for name, value in record.items():
            if name in _NO_METRICS or name.startswith("per_epoch/") or type(value) not in (int, float):
                continue
            series[name][0].append(float(record["step"]))
            series[name][1].append(float(value))
    if not series:
        return section(
            "Curves", note("There is no metric yet." if run.status == "running" else "There are no metrics.")
        )
    again = [event["step"] for event in events if event["event"] == "training" and event["step"]]
    figures = _figures(series)
    drawn = [
        charts.curves(
            title,
            [
                Line(name=name, x=series[name][0], y=series[name][1], markers=name.startswith("validation/"))
                for name in names
            ],
            marks=again,
        )
        for title, names in list(figures.items())[:_MOST_FIGURES]
    ]
    grid = Html(f'<div class="figures">\n{joined(each for each in drawn if each)}\n</div>')
    notes = [note(f"Dotted lines: attempts that resumed there ({len(again)}).")] if again else []
    notes += [note(text) for text in _not_finite(series)]
    if len(figures) > _MOST_FIGURES:
        notes.append(note(f"Not drawn: {', '.join(list(figures)[_MOST_FIGURES:])}."))
    return section("Curves", grid, *notes)


def _figures(series: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the metrics of each figure by its title. Training and validation values share a figure."""
    of_training = {name.partition("/")[2] for name in series if name.startswith("train/")}
    figures: dict[str, list[str]] = {}
    rest: dict[str, list[str]] = {}
    for name in sorted(series, key=lambda each: ("loss" not in each, not each.startswith("train/"))):
        split, _, of = name.partition("/")
        if split == "validation" and of not in of_training and of.rpartition("/")[2] in of_training:
            of = of.rpartition("/")[2]
        if split in ("train", "validation") and of:
            figures.setdefault(of, []).append(name)
        elif name == "lr" or name.startswith("lr/"):
            rest.setdefault("learning rate", []).append(name)
        elif name not in _SPEED:
            rest.setdefault(name, []).append(name)
    return {**figures, **rest, **{name: [name] for name in _SPEED if name in series}}


def _not_finite(series: Mapping[str, tuple[list[float], list[float]]]) -> Iterator[str]:
    for name, (steps, values) in series.items():
        if lost := [step for step, value in zip(steps, values, strict=True) if not math.isfinite(value)]:
            count = f"{len(lost)} value{'s are' if len(lost) > 1 else ' is'}"
            yield f"{name}: {count} not finite and not drawn, the first at step {lost[0]:,.0f}."


def _time(account: GoodputReport) -> Html:
    if account.wall_s <= 0:
        return section("Where the time went", note("Nothing is known yet."))
    spent = sorted(account.seconds.items(), key=lambda each: -each[1])
    rows = [
        (each, f"{100 * account.share(each):.1f} %", f"{seconds:,.1f} s") for each, seconds in spent if seconds >= 0.05
    ]
    if account.not_running_s >= 0.05:
        rows.append(("not running (in addition)", "", f"{account.not_running_s:,.1f} s"))
    return section(
        "Where the time went",
        element(
            "p", f"{_starts(account)}. Goodput: {100 * account.goodput:.1f} % of it went into updates that were kept."
        ),
        element("p", Html(f"<strong>Worth fixing first:</strong> {escaped(account.advice())}")),
        charts.bar("seconds by class", account.seconds, _COLORS),
        table(["class", "share", "time"], rows, numbers=("share", "time")),
    )


def _attempts(events: Sequence[Event]) -> Html:
    rows: list[list[Any]] = []
    for event in events:
        match event["event"]:
            case "attempt_started":
                hosts = ", ".join(sorted({worker["host"] for worker in event.get("workers", ())}))
                rows.append([event["attempt"], _utc(event["time"]), event["world_size"], hosts, "", "not yet"])
            case "training" if rows:
                rows[-1][4] = f"{event['step']:,}"
            case "attempt_ended" if rows:
                rows[-1][5] = f"{event['status']} at step {event['step']:,}: {event['reason']}"
            case "group_failed" if rows:
                rows[-1][5] = event["text"]
            case "driver_started" | "driver_ended" if rows and rows[-1][5] == "not yet":
                rows[-1][5] = "ended with its driver"
    failures = [
        details(
            f"Attempt {event['attempt']}, rank {event['rank']}: {event['type']}: {event['message']}",
            element("pre", event["traceback"]),
        )
        for event in events
        if event["event"] == "rank_failed" and event.get("traceback")
    ]
    headings = ["attempt", "began", "workers", "on", "from step", "ended"]
    return section("Attempts", table(headings, rows, numbers=("workers", "from step"), texts=("ended",)), *failures)


def _checkpoints(name: str, storage: str) -> Html:
    try:
        shelf = RunCheckpoints.of(name, storage)
    except ConfigError:
        return section("Checkpoints", note("There are none."))
    reasons, rows = shelf.reasons(), []
    for entry in shelf.entries:
        if (checkpoint := entry.checkpoint) is None:
            rows.append((entry.name, "", "", "", "", "damaged"))
            continue
        value = checkpoint.metrics.get(shelf.rules.monitor or "")
        rows.append((
            entry.name, str(checkpoint.epoch), _utc(checkpoint.time_s),
            human_bytes(entry.size_bytes),
            "" if value is None else charts.shown(float(value)), ", ".join(reasons[entry.name]) or "nothing",
        ))  # fmt: skip
    headings = ["checkpoint", "epoch", "saved", "size", shelf.rules.monitor or "metric", "kept for"]
    return section("Checkpoints", table(headings, rows, numbers=headings[1:2] + headings[3:5]))


def _configuration(run: Run) -> Html:
    text = run.folder.read("config.yaml") or ""
    values = {each.path: each.after for each in differences({}, parse_yaml(text) or {})}
    rows = [
        (path, values.get(path, ""), "(required)" if default is None else default)
        for path, default in run.record.defaults.items()
    ]
    unchanged = note("Nothing differs from the defaults, or the record is too old to tell.")
    return section(
        "Configuration",
        table(["setting", "value", "default"], rows) or unchanged,
        details("Full configuration", element("pre", text)),
    )


def _events(events: Sequence[Event]) -> Html:
    listed = [event for event in events if event["event"] not in _HIDDEN_EVENTS]
    rows = [
        (_utc(event["time"]), event["event"].replace("_", " "), describe(event)) for event in listed[-_MOST_EVENTS:]
    ]
    left_out = len(listed) - len(rows)
    return section(
        "Events",
        note(f"The last {len(rows)} events; {left_out:,} earlier ones are in events.jsonl.") if left_out else Html(""),
        table(["time", "event", "details"], rows, texts=("details",)) or note("There are none."),
    )


def _starts(account: GoodputReport) -> str:
    starts = f"{account.starts} start{'s'[: account.starts != 1]}"
    return f"{human_duration(account.wall_s)} in {starts} and {account.attempts} attempt{'s'[: account.attempts != 1]}"


def _pairs(values: Mapping[str, Any]) -> str:
    return " · ".join(f"{name} {value}" for name, value in values.items())


def _utc_of(iso: str) -> str:
    return _utc(datetime.fromisoformat(iso).timestamp())


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
