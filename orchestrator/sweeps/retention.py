"""Deletes the checkpoints of finished trials that are not among the best."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from headway.trainer.checkpoints.retention import Mode, is_kept
from headway.trainer.checkpoints.scan import scan
from headway.trainer.checkpoints.storage import open_storage

from ..storage.folder import join
from .record import TrialResult, ranked

_DONE = ("completed", "stopped", "time_limit")


def surplus(trials: Iterable[TrialResult], *, mode: Mode, keep: int) -> list[TrialResult]:
    """Return the finished trials that are not among the best so far.

    Failed trials keep their checkpoints for inspection. While no trial has the metric, all are kept.

    Args:
        trials: trials of the sweep.
        mode: "min" if lower is better.
        keep: how many of the best to keep.
    """
    judged, unjudged = _finished(trials, mode)
    return [*judged[keep:], *unjudged] if judged else []


def over_limit(
    trials: Iterable[TrialResult], sizes: Mapping[str, int], *, mode: Mode, limit: float
) -> list[TrialResult]:
    """Return the finished trials, worst first, whose checkpoints must go so that the others are within the limit.

    The checkpoints of the best trial are never among them.

    Args:
        trials: trials of the sweep.
        sizes: bytes of the checkpoints of finished trials, by name.
        mode: "min" if lower is better.
        limit: bytes for the checkpoints of all finished trials.
    """
    judged, unjudged = _finished(trials, mode)
    total = sum(sizes.get(trial.name, 0) for trial in (*judged, *unjudged))
    found = []
    for trial in [*unjudged, *reversed(judged[1:])] if judged else []:
        if total > limit:
            total -= sizes.get(trial.name, 0)
            found.append(trial)
    return found


def _finished(trials: Iterable[TrialResult], mode: Mode) -> tuple[list[TrialResult], list[TrialResult]]:
    """Return the finished trials with a metric, best first, and those without."""
    done = [trial for trial in trials if trial.status in _DONE]
    return ranked(done, mode), [trial for trial in done if trial.metric is None]


def checkpoint_bytes(trial: TrialResult) -> int:
    """Return the size of the checkpoints of a trial, from their manifests."""
    storage = open_storage(join(trial.run_dir, "checkpoints"))
    return sum(entry.size_bytes for entry in scan(storage))


def delete_checkpoints(trial: TrialResult) -> int:
    """Delete the checkpoints of a trial that are not pinned, and return how many."""
    storage = open_storage(join(trial.run_dir, "checkpoints"))
    names = [entry.name for entry in scan(storage) if not is_kept(storage, entry.name)]
    for name in names:
        storage.remove(name)
    return len(names)
