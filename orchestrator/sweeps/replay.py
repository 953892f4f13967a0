"""Reports of trials that ended under an earlier driver, read from their files, to replay into a new scheduler."""

from __future__ import annotations

from typing import Any

from ..runs.metric_history import metric_by_step
from ..storage.events import read_events
from ..storage.folder import Folder
from .record import Sweep
from .search import Search
from .trial import make_report


def reports_of_ended_trials(sweep: Sweep, search: Search) -> dict[str, list[dict[str, Any]]]:
    """Return the evaluations of ended trials by name, as they were reported to Ray Tune.

    Empty for `PBT` and others that pause trials: they choose among running ones.
    """
    if search.scheduler is None or search.pauses:
        return {}
    ended: dict[str, None] = {}
    for event in read_events(sweep.folder):
        if event["event"] == "trial_ended":
            ended[event["trial"]] = None
        elif event["event"] == "trial_retried":
            ended.pop(event["trial"], None)
    return dict(sweep.folder.map(lambda name: (name, _reports_of(sweep.folder.path(name), search)), ended))


def _reports_of(run_dir: str, search: Search) -> list[dict[str, Any]]:
    values = metric_by_step(Folder(run_dir), search.metric)
    return [make_report(search, value, number, step) for number, (step, value) in enumerate(values.items(), start=1)]
