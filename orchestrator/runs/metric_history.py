"""What a run has measured of one metric, by step, from its files: each evaluation counts once, however often made."""

from __future__ import annotations

from ..storage.events import read_events
from ..storage.folder import Folder


def metric_by_step(folder: Folder, metric: str) -> dict[int, float]:
    """Returns the values of a metric by step, in that order: of evaluations, or of records of the training.

    Args:
        folder: of the run.
        metric: as "validation/loss" or "train/loss".
    """
    if metric.startswith("validation/"):
        found = ((each["step"], each["metrics"]) for each in read_events(folder) if each["event"] == "evaluated")
    else:
        # Late, for it imports torch: sweeps are listed without.
        from headway.trainer.trackers.jsonl import read_records

        found = ((each["step"], each) for each in read_records(folder.path("metrics.jsonl")))
    return dict(sorted((step, float(values[metric])) for step, values in found if metric in values))
