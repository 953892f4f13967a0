"""When a sweep ends before all of its trials have been trained."""

from __future__ import annotations

from collections.abc import Iterable

from .record import TrialResult
from .search import Search


def target_reached(search: Search, trials: Iterable[TrialResult]) -> str | None:
    """Return the reason to end the sweep if an ended trial is as good as the target; otherwise None."""
    for trial in trials:
        if trial.status != "failed" and trial.metric is not None and meets_target(search, trial.metric):
            return f"{trial.name} has reached the target {search.target:g} ({search.metric} {trial.metric:.4g})"
    return None


def meets_target(search: Search, value: float) -> bool:
    """Return whether a value of the metric is as good as the target."""
    if search.target is None:
        return False
    return value <= search.target if search.mode == "min" else value >= search.target


def out_of_patience(search: Search, trials: Iterable[TrialResult]) -> str | None:
    """Return the reason to start no more trials if the last ones have not improved; otherwise None.

    Counts the trials that were suggested after the best one and have ended, also by failing.
    """
    if search.patience is None:
        return None
    ended = [trial for trial in trials if trial.has_ended]
    judged = [trial for trial in ended if trial.metric is not None and trial.status != "failed"]
    sign = 1 if search.mode == "min" else -1
    best = min(judged, key=lambda trial: (sign * (trial.metric or 0.0), trial.index), default=None)
    since = [trial for trial in ended if best is None or trial.index > best.index]
    if len(since) < search.patience:
        return None
    return f"no better trial in the last {len(since)}"
