"""The best value of a metric so far, which NaN never is and which a tie leaves to the earlier one. Plain arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from .errors import ConfigError

Mode = Literal["min", "max"]

_ROUNDING = 1e-12
"""Means over the same rows differ by so little where these were cut into other batches, or spread over other ranks."""


@dataclass(slots=True)
class Best:
    """Judges one value after the other.

    Args:
        mode: "min" where lower is better, "max" where higher is; nothing is guessed from a metric's name.
        min_delta: by how much a value must beat the best one; with 0 by anything at all.

    Attributes:
        value: the best finite value, or None before there is one.
        step: the update after which it was measured.

    Raises:
        ConfigError: `mode` is neither, or `min_delta` is below zero.
    """

    mode: Mode
    min_delta: float = 0.0
    value: float | None = None
    step: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ConfigError(f'mode is "min" where lower is better or "max" where higher is, not {self.mode!r}')
        if not 0 <= self.min_delta < math.inf:
            raise ConfigError(f"min_delta is a number from 0, not {self.min_delta!r}")

    def offer(self, value: float, *, step: int) -> bool:
        """Takes a value if it is the best so far, and returns whether it is."""
        if not self.would_take(value):
            return False
        self.value, self.step = float(value), step
        return True

    def would_take(self, value: float) -> bool:
        """Whether a value would be the best so far."""
        if not math.isfinite(value):
            return False
        return self.value is None or is_better(value, self.value, mode=self.mode, by=self.min_delta)

    def state_dict(self) -> dict[str, Any]:
        """Returns the best value and its step."""
        return {"value": self.value, "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes them over."""
        self.value, self.step = state_dict["value"], state_dict["step"]


def is_better(value: float, than: float, *, mode: Mode, by: float = 0.0) -> bool:
    """Whether a value beats another one by more than `by`, and by more than sums over other ranks or batches round.

    Nothing is better than NaN, nor NaN than anything.
    """
    if math.isclose(value, than, rel_tol=_ROUNDING):
        return False
    return value < than - by if mode == "min" else value > than + by
