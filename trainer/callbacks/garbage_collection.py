"""Collection of Python's cyclic garbage on all ranks after the same update."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..loop.progress import Duration, Schedule
from .base import Callback

if TYPE_CHECKING:
    from ..trainer import Trainer


class GarbageCollection(Callback):
    """Disables automatic collection while training, and collects on all ranks at the same updates.

    A collection can stop a rank for a large part of a second, while the others wait in the next collective; with many
    ranks, automatic collection delays nearly every update. Reference counting continues, so only cycles accumulate.

    Args:
        every: steps or epochs between collections.

    Raises:
        ConfigError: `every` is wall time, which differs between ranks.

    Source: torchtitan, torchtitan/tools/utils.py, `GarbageCollection`.

    Example:
        >>> trainer = Digits(config, callbacks=[GarbageCollection(every="500 steps")])
    """

    def __init__(self, *, every: Duration | str | int = 1000) -> None:
        self._schedule = Schedule(Duration.parse(every))
        if self._schedule.every and self._schedule.every.unit == "seconds":
            raise ConfigError(f"every must be in steps or epochs, got {every}: wall time differs between ranks")
        self._turned_off = False

    def on_fit_start(self, trainer: Trainer[Any]) -> None:
        """Collect the garbage of setup, and disable automatic collection."""
        gc.collect()
        if gc.isenabled():
            self._turned_off = True
            gc.disable()

    def on_step_end(self, trainer: Trainer[Any]) -> None:
        """Collect, if due."""
        if self._schedule.due(trainer.progress, ended="steps"):
            gc.collect()

    def on_epoch_end(self, trainer: Trainer[Any], metrics: object) -> None:
        """Collect, if due."""
        if self._schedule.due(trainer.progress, ended="epochs"):
            gc.collect()

    def on_fit_end(self, trainer: Trainer[Any], error: BaseException | None) -> None:
        """Enable automatic collection again, if it was enabled before."""
        if self._turned_off:
            self._turned_off = False
            gc.enable()
