"""The values of one metric of a run by step, from its files. Repeated evaluations of a step count once."""

from __future__ import annotations

from ..storage.events import read_events
from ..storage.folder import Folder


def metric_by_step(folder: Folder, metric: str) -> dict[int, float]:
    """Return the values of a metric by step, in the order of steps.

    Args:
        folder: the run's folder.
        metric: such as "validation/loss" (from evaluations) or "train/loss" (from records of the training).
    """
    if metric.startswith("validation/"):
        found = ((each["step"], each["metrics"]) for each in read_events(folder) if each["event"] == "evaluated")
    else:
        # Imported here: torch is slow to import, and sweeps are listed without it.
        from headway.trainer.trackers.jsonl import read_records

        found = ((each["step"], each) for each in read_records(folder.path("metrics.jsonl")))
    return dict(sorted((step, float(values[metric])) for step, values in found if metric in values))
