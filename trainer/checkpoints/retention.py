"""Choose the checkpoints to keep and the best one, from their manifests; mark checkpoints to keep."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cmp_to_key
from typing import Any, Literal, get_args

from ..errors import CheckpointError, ConfigError
from ..loop.progress import Duration
from .format.manifest import Checkpoint
from .storage import Storage

_HIGHER_IS_BETTER = frozenset(
    ("acc", "accuracy", "auc", "auroc", "bleu", "dice", "f1", "iou", "map", "miou", "precision", "psnr", "r2", "recall",
     "reward", "rouge", "ssim")
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Retention:
    """Which checkpoints a run keeps: the last ones, the best ones, and some permanently.

    Attributes:
        keep_last: number of most recently saved checkpoints; "all" deletes none.
        monitor: metric that ranks checkpoints; with None, no checkpoint counts as best.
        mode: "min" if lower is better, "max" if higher is.
        keep_best: number of best checkpoints.
        keep_every: steps or epochs; the first checkpoint at or after each multiple is kept.
        keep_every_time: seconds; the first checkpoint in each such interval is kept.

    Raises:
        ConfigError: a number or a unit is invalid.
    """

    keep_last: int | Literal["all"] = 2
    monitor: str | None = None
    mode: Mode = "min"
    keep_best: int = 1
    keep_every: Duration | None = None
    keep_every_time: Duration | None = None

    def __post_init__(self) -> None:
        if self.keep_last != "all" and not _whole(self.keep_last, at_least=1):
            raise ConfigError(f'keep_last must be an integer >= 1 or "all", got {self.keep_last!r}')
        if not _whole(self.keep_best, at_least=0):
            raise ConfigError(f"keep_best must be an integer >= 0, got {self.keep_best!r}")
        if self.keep_every is not None and self.keep_every.unit == "seconds":
            raise ConfigError(
                f'keep_every must be in steps or epochs, such as "5000 steps", got {self.keep_every}; '
                "for a time, set keep_every_time"
            )
        if self.keep_every_time is not None and self.keep_every_time.unit != "seconds":
            raise ConfigError(f'keep_every_time must be a time such as "30m", got {self.keep_every_time}')

    def to_delete(self, checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Return the checkpoints to delete, given all checkpoints in commit order."""
        reasons = self.reasons(checkpoints)
        return [each for each in checkpoints if not reasons[each.path]]

    def reasons(self, checkpoints: Sequence[Checkpoint]) -> dict[str, list[str]]:
        """Return the reasons to keep each checkpoint, by path."""
        last = checkpoints if self.keep_last == "all" else checkpoints[-self.keep_last :]
        keeping = {"last": last, "best": self.ranked(checkpoints)[: self.keep_best]}
        for every in (self.keep_every, self.keep_every_time):
            if every is not None:
                keeping[f"every {every}"] = _firsts(checkpoints, every)
        paths = {why: {each.path for each in kept} for why, kept in keeping.items()}
        return {each.path: [why for why, kept in paths.items() if each.path in kept] for each in checkpoints}

    def best(self, checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
        """Return the checkpoint with the best finite metric, the earliest of equals; None if none has it."""
        return next(iter(self.ranked(checkpoints)), None)

    def ranked(self, checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Return the checkpoints with a finite metric, the best first; of equal ones the earliest first."""
        if self.monitor is None:
            return []
        monitor = self.monitor

        def order(one: Checkpoint, other: Checkpoint) -> int:
            ours, theirs = one.metrics[monitor], other.metrics[monitor]
            return is_better(theirs, ours, mode=self.mode) - is_better(ours, theirs, mode=self.mode)

        judged = [each for each in checkpoints if math.isfinite(each.metrics.get(monitor, math.nan))]
        return sorted(judged, key=cmp_to_key(order))


def _firsts(checkpoints: Sequence[Checkpoint], every: Duration) -> list[Checkpoint]:
    """Return the first checkpoint at or after each multiple; a run need not have saved exactly there."""
    first: dict[int, Checkpoint] = {}
    for each in checkpoints:
        done = {"steps": each.step, "epochs": each.epoch, "seconds": each.time_s}[every.unit]
        first.setdefault(int(done // every.amount), each)
    return [each for multiple, each in first.items() if multiple > 0]


def _whole(value: object, *, at_least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


Mode = Literal["min", "max"]

_ROUNDING = 1e-12
"""Relative rounding error of a mean when the same rows are batched or distributed differently."""


@dataclass(slots=True)
class Best:
    """The best value of a metric so far.

    Args:
        mode: "min" if lower is better, "max" if higher is.
        min_delta: an improvement must beat the best value by more than this; 0 accepts any improvement.

    Attributes:
        value: the best finite value; None before the first.
        step: the update after which it was measured.

    Raises:
        ConfigError: `mode` or `min_delta` is invalid.
    """

    mode: Mode
    min_delta: float = 0.0
    value: float | None = None
    step: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ConfigError(f'mode must be "min" (lower is better) or "max" (higher is better), got {self.mode!r}')
        if not 0 <= self.min_delta < math.inf:
            raise ConfigError(f"min_delta must be a number >= 0, got {self.min_delta!r}")

    def update(self, value: float, *, step: int) -> bool:
        """Record a value if it is the best so far; return whether it is."""
        is_improved = math.isfinite(value) and (
            self.value is None or is_better(value, self.value, mode=self.mode, by=self.min_delta)
        )
        if is_improved:
            self.value, self.step = float(value), step
        return is_improved

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and its step."""
        return {"value": self.value, "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best value and its step."""
        self.value, self.step = state_dict["value"], state_dict["step"]


def is_better(value: float, than: float, *, mode: Mode, by: float = 0.0) -> bool:
    """Whether a value is better than another by more than `by` and by more than rounding error.

    False if either value is NaN.
    """
    if math.isclose(value, than, rel_tol=_ROUNDING):
        return False
    return value < than - by if mode == "min" else value > than + by


KEEP_MARK = "pinned"
"""The file that marks a checkpoint as pinned (`headway checkpoints pin`): it is never deleted by a rule."""


def mark_kept(storage: Storage, name: str) -> None:
    """Pin a checkpoint: keep it permanently, even by a run that is training now.

    Raises:
        CheckpointError: there is no such checkpoint, or it was just deleted.
    """
    try:
        if storage.committed(name):
            storage.write(name, KEEP_MARK, b"")
    except FileNotFoundError:
        pass
    # Checked after setting the mark, because the run looks for marks before it deletes.
    if not storage.committed(name):
        raise CheckpointError(f"cannot pin {storage.path_of(name)}: there is no such checkpoint")


def unmark_kept(storage: Storage, name: str) -> None:
    """Unpin a checkpoint; the run's retention decides at its next save."""
    if is_kept(storage, name):
        storage.unlink(name, KEEP_MARK)


def is_kept(storage: Storage, name: str) -> bool:
    """Return whether a checkpoint is pinned."""
    return storage.has(name, KEEP_MARK)


def warn_of_mode(owner: str, monitor: str, mode: Mode) -> None:
    """Warn if the lowest value counts as the best of a metric like an accuracy, as by default."""
    if mode == "min" and _HIGHER_IS_BETTER.intersection(re.split(r"[^a-z0-9]+", monitor.lower())):
        warnings.warn(
            f"{owner} with monitor={monitor!r} and mode='min' takes the lowest value as the best: set mode='max', "
            "unless that is what you want",
            stacklevel=4,
        )
