"""The body of a sweep's report: the best trial, the hyperparameters of all, and their curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headway.trainer.errors import ConfigError
from headway.trainer.trackers.jsonl import read_records

from ..sweeps.record import TrialResult
from ..sweeps.result import SweepResult, labels
from . import charts
from .charts import Line
from .html import Html, element, escaped, facts, joined, note, section, table

_MOST_CURVES = 100
_PALE = "#c9d1d9"
_BEST = "#0969da"


def sweep_body(result: SweepResult) -> Html:
    """Return the body of the page."""
    status = element("span", result.status.replace("_", " "), class_=f"status {result.status}")
    name = result.sweep_dir.rstrip("/").rpartition("/")[2]
    counts = {each.status: 0 for each in result.trials}
    for each in result.trials:
        counts[each.status] += 1
    best = result.best
    return joined([
        element("h1", Html(f"{escaped(name)} {status}")),
        element("p", result.reason) if result.reason else Html(""),
        facts({
            "trials": ", ".join(f"{number} {state}" for state, number in counts.items()) or "none yet",
            "objective": f"{'lowest' if result.mode == 'min' else 'highest'} {result.metric}",
            "best": "" if best is None or best.metric is None else f"{best.name}: {charts.shown(best.metric)}",
            "best values": _values(best.values) if best else "",
            "best checkpoint": best.checkpoint if best else "",
            "files": result.sweep_dir,
        }),
        _figures(result),
        _pareto(result),
        _importances(result),
        _table(result),
        _errors(result),
    ])  # fmt: skip


def _figures(result: SweepResult) -> Html:
    ranked = result.ranked()
    if not ranked:
        return section("Curves", note(f"No trial has a finite {result.metric} yet."))
    drawn = ranked[:_MOST_CURVES]
    named = labels(path for trial in drawn for path in trial.values)
    axes = {name: [trial.values.get(path, "-") for trial in drawn] for path, name in named.items()}
    axes[result.metric] = [trial.metric for trial in drawn]
    places = len(drawn) - 1 or 1
    left_out = len(result.trials) - len(ranked)
    return section(
        "Curves",
        Html(f'<div class="figures">\n{joined([_best_so_far(result), _of_trials(result, ranked)])}\n</div>'),
        charts.parallel_coordinates(
            "hyperparameters by trial: dark is good, the thick line is the best trial",
            axes,
            names=[trial.name for trial in drawn],
            worth=[1 - place / places for place in range(len(drawn))],
        ),
        note(f"The best {len(drawn)} of {len(ranked)} trials; the table shows all.") if drawn != ranked else Html(""),
        note(f"Not drawn, without a finite value: {left_out} of {len(result.trials)} trials.")
        if left_out
        else Html(""),
    )


def _best_so_far(result: SweepResult) -> Html:
    """Draw each trial's value in the order of suggestion, and the best so far."""
    judged = {trial.name for trial in result.ranked()}
    better = min if result.mode == "min" else max
    x: list[float] = []
    y: list[float] = []
    names: list[str] = []
    best: list[float] = []
    for number, trial in enumerate(result.trials, 1):
        if trial.name not in judged or trial.metric is None:
            continue
        x.append(float(number))
        y.append(trial.metric)
        names.append(f"{trial.name}: {_values(trial.values)}")
        best.append(trial.metric if not best else better(best[-1], trial.metric))
    lines = [
        Line(name="trial", x=x, y=y, width=0, color="#8c959f", texts=names, markers=True),
        Line(name="best so far", x=x, y=best, color=_BEST, step=True),
    ]
    return charts.curves(f"{result.metric} by trial", lines, x_title="trial")


def _of_trials(result: SweepResult, ranked: Sequence[TrialResult]) -> Html:
    """Draw the metric of each trial over its steps, the best trial on top."""
    lines = []
    for trial in ranked[:_MOST_CURVES]:
        points = [
            (float(record["step"]), float(record[result.metric]))
            for record in read_records(f"{trial.run_dir}/metrics.jsonl")
            if type(record.get(result.metric)) in (int, float)
        ]
        x, y = zip(*points, strict=True) if points else ((), ())
        is_best = trial is ranked[0]
        lines.append(
            Line(name=trial.name, x=x, y=y, color=_BEST if is_best else _PALE, width=2.6 if is_best else 1.2,
                 texts=[f"{trial.name}: {_values(trial.values)}"] * len(x))
        )  # fmt: skip
    title = f"{result.metric} by step, the best trial in blue"
    return charts.curves(title, lines[::-1], legend=False)


def _pareto(result: SweepResult) -> Html:
    """Return the trials that are not dominated; nothing for a single objective."""
    if not result.objectives:
        return Html("")
    names = (result.metric, *result.objectives)
    rows = [
        (trial.name, *(charts.shown(trial.metrics[name]) for name in names), _values(trial.values))
        for trial in result.pareto
    ]
    return section("Not dominated (Pareto)", table(["trial", *names, "values"], rows, numbers=names))


def _importances(result: SweepResult) -> Html:
    """Return how much each parameter matters; nothing without Optuna or with too few trials."""
    try:
        found = result.importances
    except ConfigError:
        return Html("")
    if not found:
        return Html("")
    rows = [(path, f"{share:.0%}") for path, share in found.items()]
    return section(
        "Importance of parameters",
        table(["parameter", f"share of the variance of {result.metric}"], rows),
        note("By Optuna's fANOVA, over the completed trials."),
    )


def _table(result: SweepResult) -> Html:
    paths = list(dict.fromkeys(path for trial in result.trials for path in trial.values))
    order = {trial.name: place for place, trial in enumerate(result.ranked())}
    trials = sorted(result.trials, key=lambda trial: order.get(trial.name, len(order)))
    rows = [
        (
            trial.name, trial.status, "" if trial.metric is None else charts.shown(trial.metric),
            f"{trial.steps:,}", *(charts.shown(trial.values.get(path, "")) for path in paths),
        )
        for trial in trials
    ]  # fmt: skip
    headings = ["trial", "status", result.metric, "steps", *paths]
    numeric = [
        path for path in paths if all(type(trial.values.get(path, 0)) in (int, float) for trial in result.trials)
    ]
    numbers = (result.metric, "steps", *numeric)
    return section(
        "Trials", table(headings, rows, numbers=numbers, best=0 if order else None) or note("There are none yet.")
    )


def _errors(result: SweepResult) -> Html:
    rows = [(trial.name, trial.error or trial.reason) for trial in result.failed]
    return section("Failed", table(["trial", "error"], rows, texts=("error",))) if rows else Html("")


def _values(values: Mapping[str, object]) -> str:
    named = labels(values)
    return ", ".join(f"{named[path]} {charts.shown(value)}" for path, value in values.items())
