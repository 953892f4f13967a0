"""Ends a run when it has taken as long as it may, over all its attempts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..loop.progress import Duration
from .base import Callback
from .progress_bar import human_duration

if TYPE_CHECKING:
    from ..trainer import Trainer


class TimeLimit(Callback):
    """Asks for an orderly end, with a checkpoint and the status "time_limit", when the time is up.

    It counts the time inside `fit` over all attempts, setting up included, as far as checkpoints tell: what an attempt
    did after its last checkpoint is not in it. The main rank's clock decides, after every update and every batch of an
    evaluation. A run whose time is up already stops before its first update.

    Args:
        limit: "90m", "2h30m", "1d", or a number of seconds.

    Raises:
        ConfigError: this is no such time.

    Example:
        >>> trainer = Digits(config, callbacks=[TimeLimit("2h30m")])
    """

    def __init__(self, limit: Duration | str | float) -> None:
        is_number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
        parsed = Duration(float(limit), "seconds") if is_number else Duration.parse(limit)  # type: ignore[arg-type]
        if parsed.unit != "seconds":
            raise ConfigError(f'a time limit is a time, such as "90m", "2h30m" or 5400 (seconds), not {limit!r}')
        self.limit_s = float(parsed.amount)

    def on_fit_start(self, trainer: Trainer[Any]) -> None:
        """Looks at the clock."""
        self._look(trainer)

    def on_step_end(self, trainer: Trainer[Any]) -> None:
        """Looks at the clock."""
        self._look(trainer)

    def on_step_skipped(self, trainer: Trainer[Any], reason: str) -> None:
        """Looks at the clock."""
        self._look(trainer)

    def on_evaluation_batch_end(self, trainer: Trainer[Any], outputs: Any, batch: Any, batch_idx: int) -> None:
        """Looks at the clock."""
        self._look(trainer)

    def _look(self, trainer: Trainer[Any]) -> None:
        if trainer.elapsed_s >= self.limit_s and trainer.world.is_main:
            trainer.request_stop(f"the time limit of {human_duration(self.limit_s)} is reached", status="time_limit")
