"""Which finished trials of a sweep lose their checkpoints for the sake of the disk. The best ones never do."""

from __future__ import annotations

from collections.abc import Iterable

from headway.trainer.checkpoints.retention import Mode, is_kept
from headway.trainer.checkpoints.scan import scan
from headway.trainer.checkpoints.storage import open_storage

from ..storage.folder import join
from .record import Trial

_DONE = ("completed", "stopped", "time_limit")


def surplus(trials: Iterable[Trial], *, mode: Mode, keep: int) -> list[Trial]:
    """Return the trials that came to their end and are not among the best so far.

    Trials that failed are left as they are: somebody may want to look. As long as no trial has the metric, none is
    better than another, and all are kept.

    Args:
        trials: of the sweep.
        mode: of its metric.
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
