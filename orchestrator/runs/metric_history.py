"""The values of one metric of a run by step, from its files."""

from __future__ import annotations

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
