"""Which checkpoints stay, and which one is the best: pure functions of what their manifests say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .best import Best, Mode
from .manifest import Checkpoint
from .progress import Duration


@dataclass(frozen=True, slots=True)
class Retention:
    """What a run keeps: the checkpoints saved last, the best one, and some for good.

    Attributes:
        keep_last: how many of those saved last; "all" deletes none.
        monitor: the metric by which one is the best; None keeps none for that.
        mode: "min" where lower is better, "max" where higher is.
        keep_every: steps or epochs; the first checkpoint at or after each multiple of it stays.
    """

    keep_last: int | Literal["all"] = 2
    monitor: str | None = None
    mode: Mode = "min"
    keep_every: Duration | None = None

    def superseded(self, checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Returns those that nothing keeps, of checkpoints in the order of their commits."""
        if self.keep_last == "all":
            return []
        kept = [*checkpoints[-self.keep_last :], self.best(checkpoints), *self.milestones(checkpoints)]
        return [each for each in checkpoints if each not in kept]

    def best(self, checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
        """Returns the one with the best finite value of the metric; of equal ones the earliest. None if none has it."""
        best, found = Best(self.mode), None
        for each in checkpoints:
            if self.monitor in each.metrics and best.offer(each.metrics[self.monitor], step=each.step):
                found = each
        return found

    def milestones(self, checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Returns the first one at or after each multiple of `keep_every`: a run need not have saved just there."""
        if self.keep_every is None:
            return []
        first: dict[int, Checkpoint] = {}
        for each in checkpoints:
            done = each.step if self.keep_every.unit == "steps" else each.epoch
            first.setdefault(int(done // self.keep_every.amount), each)
        return [each for multiple, each in first.items() if multiple > 0]
