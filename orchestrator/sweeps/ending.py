"""When a sweep ends before all of its trials have been trained."""

from __future__ import annotations

from collections.abc import Iterable

from .record import TrialResult, ranked
from .search import Search


def target_reached(search: Search, trials: Iterable[TrialResult]) -> str | None:
    """Return the reason to end the sweep if a trial is as good as the target and has not failed; otherwise None."""
    reasons = (meets_target(search, trial.name, trial.metric) for trial in trials if trial.status != "failed")
    return next(filter(None, reasons), None)


def meets_target(search: Search, name: str, value: float | None) -> str | None:
    """Return the reason to end the sweep if a value of a trial is as good as the target; otherwise None."""
    if search.target is None or value is None:
        return None
    if value > search.target if search.mode == "min" else value < search.target:
        return None
    return f"{name} has reached the target {search.target:g} ({search.metric} {value:.4g})"


def out_of_patience(search: Search, trials: Iterable[TrialResult]) -> str | None:
    """Return the reason to start no more trials if the last ones have not improved; otherwise None.

    Counts the trials that were suggested after the best one and have ended, also by failing.
    """
    if search.patience is None:
        return None
    ended = [trial for trial in trials if trial.has_ended]
    best = next(iter(ranked(ended, search.mode)), None)
    since = [trial for trial in ended if best is None or trial.index > best.index]
    if len(since) < search.patience:
        return None
    return f"no better trial in the last {len(since)}"
