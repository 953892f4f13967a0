"""Decides whether a loss has jumped away from what is usual. Plain arithmetic: the loop does what follows from it."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any

from ..config import LossSpikeConfig

_ENOUGH = 5
_MAD_TO_DEVIATION = 1.4826  # of a normal distribution: https://en.wikipedia.org/wiki/Median_absolute_deviation
_LEAST_DEVIATION = 0.01


class SpikeDetector:
    """Knows the last losses that were usual. Every rank has one and hears the same losses, so all decide alike.

    A loss is a spike if it is not finite, or lies above the median of these by more than `factor` times their usual
    deviation: the median of their distances to the median, or a hundredth of the median where they hardly differ.
    Nothing finite is a spike before there are five. Losses that fall are never one.

    Each is a mean over some samples, whose deviation goes with one over the root of their number: a short interval, as
    at the end of an epoch, may lie further off.

    Attributes:
        rollbacks: how often the run went back, over all its attempts.
        good_step: the update whose loss was the last usual one.
    """

    def __init__(self, config: LossSpikeConfig) -> None:
        self._config = config
        self._usual: deque[tuple[float, int]] = deque(maxlen=config.window)
        self.rollbacks = 0
        self.good_step = 0

    def limit(self, *, samples: int) -> float:
        """Returns the loss above which the next one, over so many samples, would be a spike."""
        if len(self._usual) < _ENOUGH:
            return math.inf
        middle = median(loss for loss, _ in self._usual)
        deviation = _MAD_TO_DEVIATION * median(abs(loss - middle) * math.sqrt(of / samples) for loss, of in self._usual)
        return middle + self._config.factor * max(deviation, _LEAST_DEVIATION * abs(middle))

    def is_spike(self, loss: float, *, samples: int, step: int) -> bool:
        """Whether the loss over the last samples up to update `step` is one; if not, it becomes one of the usual."""
        if not math.isfinite(loss) or loss > self.limit(samples=samples):
            return True
        self._usual.append((loss, samples))
        self.good_step = step
        return False

    def rolled_back(self, step: int) -> None:
        """Takes note that the run stands at an earlier update again."""
        self.rollbacks += 1
        self.good_step = step

    def state_dict(self) -> dict[str, Any]:
        """Returns the usual losses, and the counts."""
        return {
            "usual": [loss for loss, _ in self._usual],
            "samples": [samples for _, samples in self._usual],
            "rollbacks": self.rollbacks,
            "good_step": self.good_step,
        }

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Restores the usual losses and the counts."""
        usual = zip(state["usual"], state["samples"], strict=True)
        self._usual = deque(usual, maxlen=self._config.window)
        self.rollbacks, self.good_step = state["rollbacks"], state["good_step"]
