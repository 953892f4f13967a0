"""Python's cyclic garbage, collected by all ranks after the same update instead of whenever one of them likes."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..loop.progress import Duration, Schedule
from .base import Callback

if TYPE_CHECKING:
    from ..trainer import Trainer


class GarbageCollection(Callback):
    """Turns automatic collection off while training, and collects on all ranks at once.

    A collection stops a rank for a good part of a second, and the others wait for it in the next collective; on many
    ranks somebody collects in every update. Reference counting goes on, so memory grows by cycles alone.

    Args:
        every: steps or epochs from one collection to the next.

    Raises:
        ConfigError: `every` is wall time, which differs between ranks.

    Source: torchtitan, torchtitan/tools/utils.py, `GarbageCollection`.

    Example:
        >>> trainer = Digits(config, callbacks=[GarbageCollection(every="500 steps")])
    """

    def __init__(self, *, every: Duration | str | int = 1000) -> None:
        self._schedule = Schedule(Duration.parse(every))
        if self._schedule.every and self._schedule.every.unit == "seconds":
            raise ConfigError(f"ranks collect after the same update: every is in steps or epochs, not {every}")
        self._turned_off = False

    def on_fit_start(self, trainer: Trainer[Any]) -> None:
        """Collects what setting up has left, and turns automatic collection off."""
        gc.collect()
        if gc.isenabled():
            self._turned_off = True
            gc.disable()

    def on_step_end(self, trainer: Trainer[Any]) -> None:
        """Collects, if it is time."""
        if self._schedule.due(trainer.progress, ended="steps"):
            gc.collect()

    def on_epoch_end(self, trainer: Trainer[Any], metrics: object) -> None:
        """Collects, if it is time."""
        if self._schedule.due(trainer.progress, ended="epochs"):
            gc.collect()

    def on_fit_end(self, trainer: Trainer[Any], error: BaseException | None) -> None:
        """Turns automatic collection on again, if it was on before."""
        if self._turned_off:
            self._turned_off = False
            gc.enable()
