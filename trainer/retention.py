"""Which checkpoints stay, and which are the best: pure functions of what their manifests say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cmp_to_key
from typing import Literal

from .best import Mode, is_better
from .errors import ConfigError
from .manifest import Checkpoint
from .progress import Duration


@dataclass(frozen=True, slots=True)
class Retention:
    """What a run keeps: the checkpoints saved last, the best ones, and some for good.

    Attributes:
        keep_last: how many of those saved last; "all" deletes none.
        monitor: the metric by which some are the best; None keeps none for that.
        mode: "min" where lower is better, "max" where higher is.
        keep_best: how many of the best.
        keep_every: steps or epochs; the first checkpoint at or after each multiple of it stays.
        keep_every_time: seconds; the first checkpoint in each such stretch of the clock stays.

    Raises:
        ConfigError: a number or a unit is not one of these.
    """

    keep_last: int | Literal["all"] = 2
    monitor: str | None = None
    mode: Mode = "min"
    keep_best: int = 1
    keep_every: Duration | None = None
    keep_every_time: Duration | None = None

    def __post_init__(self) -> None:
        if self.keep_last != "all" and not _whole(self.keep_last, at_least=1):
            raise ConfigError(f'keep_last is a whole number from 1, or "all", not {self.keep_last!r}')
        if not _whole(self.keep_best, at_least=0):
            raise ConfigError(f"keep_best is a whole number from 0, not {self.keep_best!r}")
        if self.keep_every is not None and self.keep_every.unit == "seconds":
            raise ConfigError(
                f'keep_every counts steps or epochs, such as "5000 steps", not {self.keep_every}: '
                "a time belongs to keep_every_time"
            )
        if self.keep_every_time is not None and self.keep_every_time.unit != "seconds":
            raise ConfigError(f'keep_every_time is a time such as "30m", not {self.keep_every_time}')

    def superseded(self, checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Returns those that nothing keeps, of checkpoints in the order of their commits."""
        reasons = self.reasons(checkpoints)
        return [each for each in checkpoints if not reasons[each.path]]

    def reasons(self, checkpoints: Sequence[Checkpoint]) -> dict[str, list[str]]:
        """Returns by its path what keeps each of the checkpoints, in words."""
        last = checkpoints if self.keep_last == "all" else checkpoints[-self.keep_last :]
        keeping = {"last": last, "best": self.ranked(checkpoints)[: self.keep_best]}
        for every in (self.keep_every, self.keep_every_time):
            if every is not None:
                keeping[f"every {every}"] = _firsts(checkpoints, every)
        paths = {why: {each.path for each in kept} for why, kept in keeping.items()}
        return {each.path: [why for why, kept in paths.items() if each.path in kept] for each in checkpoints}

    def best(self, checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
        """Returns the one with the best finite value of the metric; of equal ones the earliest. None if none has it."""
        return next(iter(self.ranked(checkpoints)), None)

    def ranked(self, checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Returns those with a finite value of the metric, the best first; of equal ones the earliest."""
        if self.monitor is None:
            return []
        monitor = self.monitor

        def order(one: Checkpoint, other: Checkpoint) -> int:
            ours, theirs = one.metrics[monitor], other.metrics[monitor]
            return is_better(theirs, ours, mode=self.mode) - is_better(ours, theirs, mode=self.mode)

        judged = [each for each in checkpoints if math.isfinite(each.metrics.get(monitor, math.nan))]
        return sorted(judged, key=cmp_to_key(order))


def _firsts(checkpoints: Sequence[Checkpoint], every: Duration) -> list[Checkpoint]:
    """The first one at or after each multiple: a run need not have saved just there."""
    first: dict[int, Checkpoint] = {}
    for each in checkpoints:
        done = {"steps": each.step, "epochs": each.epoch, "seconds": each.time_s}[every.unit]
        first.setdefault(int(done // every.amount), each)
    return [each for multiple, each in first.items() if multiple > 0]


def _whole(value: object, *, at_least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least
