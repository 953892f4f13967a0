"""Stop a run after a total time over all its attempts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..loop.progress import Duration
from ..metrics.units import human_duration
from .base import Callback

if TYPE_CHECKING:
    from ..trainer import Trainer


class TimeLimit(Callback):
    """Requests a stop with a checkpoint and the status "time_limit" when the time is up.

    Counts the time inside `fit`, including setup, over all attempts; time after the last checkpoint of an attempt is
    lost. Rank 0's clock decides, after every update and every batch of an evaluation. A resumed run whose time is up
    stops before its first update.

    Args:
        limit: "90m", "2h30m", "1d", or a number of seconds.

    Raises:
        ConfigError: `limit` is not a time.

    Example:
        >>> trainer = Digits(config, callbacks=[TimeLimit("2h30m")])
    """

    def __init__(self, limit: Duration | str | float) -> None:
        is_number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
        parsed = Duration(float(limit), "seconds") if is_number else Duration.parse(limit)  # type: ignore[arg-type]
        if parsed.unit != "seconds":
            raise ConfigError(f'limit must be a time, such as "90m", "2h30m" or 5400 (seconds), got {limit!r}')
        self.limit_s = float(parsed.amount)

    def on_fit_start(self, trainer: Trainer[Any]) -> None:
        """Check the clock."""
        self._check(trainer)

    def on_step_end(self, trainer: Trainer[Any]) -> None:
        """Check the clock."""
        self._check(trainer)

    def on_step_skipped(self, trainer: Trainer[Any], reason: str) -> None:
        """Check the clock."""
        self._check(trainer)

    def on_evaluation_batch_end(self, trainer: Trainer[Any], outputs: Any, batch: Any, batch_idx: int) -> None:
        """Check the clock."""
        self._check(trainer)

    def _check(self, trainer: Trainer[Any]) -> None:
        if trainer.elapsed_s >= self.limit_s and trainer.world.is_main:
            trainer.request_stop(f"the time limit of {human_duration(self.limit_s)} is reached", status="time_limit")
