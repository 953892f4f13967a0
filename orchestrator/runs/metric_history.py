"""The metrics of a run by step, from its files."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter

from ..storage.events import read_events
from ..storage.folder import Folder


def metric_by_step(folder: Folder, metric: str) -> dict[int, float]:
    """Return the values of a metric by step, in the order of steps. The last evaluation of a step counts.

    Args:
        folder: the run's folder.
        metric: such as "validation/loss" (from evaluations) or "train/loss" (from records of the training).
    """
    if metric.startswith("validation/"):
        found = ((each["step"], each["metrics"]) for each in read_events(folder) if each["event"] == "evaluated")
    else:
        # Imported here because it imports torch, and sweeps are listed without it.
        from headway.trainer.trackers.jsonl import read_records

        found = ((each["step"], each) for each in read_records(folder.path("metrics.jsonl")))
    return dict(sorted((step, float(values[metric])) for step, values in found if metric in values))


def metrics_at(folder: Folder, steps: Iterable[int]) -> dict[int, dict[str, float]]:
    """Return the last value of each metric at some steps, by step, as callbacks have received them.

    Args:
        folder: the run's folder.
        steps: the steps.
    """
    from headway.trainer.result import PER_EPOCH
    from headway.trainer.trackers.jsonl import read_records

    records = sorted(read_records(folder.path("metrics.jsonl")), key=itemgetter("step"))
    found: dict[int, dict[str, float]] = {}
    for step in steps:
        found[step] = {
            name: value
            for record in records
            if record["step"] <= step
            for name, value in record.items()
            if name not in ("step", "epoch", "time", "attempt") and not name.startswith(PER_EPOCH)
        }
    return found
