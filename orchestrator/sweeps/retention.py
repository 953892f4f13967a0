"""Deletes the checkpoints of finished trials that are not among the best."""

from __future__ import annotations

from collections.abc import Iterable

from headway.trainer.checkpoints.retention import Mode, is_kept
from headway.trainer.checkpoints.scan import scan
from headway.trainer.checkpoints.storage import open_storage

from ..storage.folder import join
from .record import Trial

_DONE = ("completed", "stopped", "time_limit")


def surplus(trials: Iterable[Trial], *, mode: Mode, keep: int) -> list[Trial]:
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


def delete_checkpoints(trial: Trial) -> int:
    """Delete the checkpoints of a trial that are not pinned, and return how many."""
    storage = open_storage(join(trial.run_dir, "checkpoints"))
    names = [entry.name for entry in scan(storage) if not is_kept(storage, entry.name)]
    for name in names:
        storage.remove(name)
    return len(names)
