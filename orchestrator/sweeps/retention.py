"""Deletes the checkpoints of finished trials that are not among the best."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from headway.trainer.checkpoints.retention import Mode, is_kept
from headway.trainer.checkpoints.scan import scan
from headway.trainer.checkpoints.storage import open_storage

from ..storage.folder import join
from .record import TrialResult

_DONE = ("completed", "stopped", "time_limit")


def surplus(trials: Iterable[TrialResult], *, mode: Mode, keep: int) -> list[TrialResult]:
    """Return the finished trials that are not among the best so far.

    Failed trials keep their checkpoints for inspection. While no trial has the metric, all are kept.

    Args:
        trials: trials of the sweep.
        mode: "min" if lower is better.
        keep: how many of the best to keep.
    """
    done = [trial for trial in trials if trial.status in _DONE]
    judged = [trial for trial in done if trial.metric is not None]
    if not judged:
        return []
    judged.sort(key=lambda trial: (trial.metric or 0.0) * (1 if mode == "min" else -1))
    best = {trial.name for trial in judged[:keep]}
    return [trial for trial in done if trial.name not in best]


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
    finished = [trial for trial in trials if trial.status in _DONE]
    kept = {trial.name for trial in finished}
    found = []
    # Those without a metric come first; each call puts the next worse one in front.
    for keep in range(len(finished), 0, -1):
        for trial in surplus(finished, mode=mode, keep=keep):
            if trial.name in kept and sum(sizes.get(name, 0) for name in kept) > limit:
                kept.discard(trial.name)
                found.append(trial)
    return found


def checkpoint_bytes(trial: TrialResult) -> int:
    """Return the size of the checkpoints of a trial, from their manifests."""
    storage = open_storage(join(trial.run_dir, "checkpoints"))
    return sum(each.size_bytes for entry in scan(storage) for each in entry.files.values())


def delete_checkpoints(trial: TrialResult) -> int:
    """Delete the checkpoints of a trial that are not pinned, and return how many."""
    storage = open_storage(join(trial.run_dir, "checkpoints"))
    names = [entry.name for entry in scan(storage) if not is_kept(storage, entry.name)]
    for name in names:
        storage.remove(name)
    return len(names)
