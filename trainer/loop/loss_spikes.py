"""Detection of loss spikes; the loop rolls back after one."""

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
    """Compares each loss with recent ones. All ranks see the same losses, so they decide alike.

    A loss is a spike if it is not finite, or exceeds the median of the recent losses by more than `factor` typical
    deviations: their median absolute deviation, but at least 1% of the median. With fewer than five recent losses, no
    finite loss is a spike.

    Each loss is a mean over samples, whose deviation is proportional to 1/sqrt(samples): for a short interval, as at
    the end of an epoch, the limit is higher.

    Attributes:
        rollbacks: number of rollbacks, over all attempts of the run.
        good_step: the update of the last loss that was not a spike.
    """

    def __init__(self, config: LossSpikeConfig) -> None:
        self._config = config
        self._usual: deque[tuple[float, int]] = deque(maxlen=config.window)
        self.rollbacks = 0
        self.good_step = 0

    def limit(self, *, samples: int) -> float:
        """Return the limit above which a loss over `samples` samples is a spike."""
        if len(self._usual) < _ENOUGH:
            return math.inf
        middle = median(loss for loss, _ in self._usual)
        deviation = _MAD_TO_DEVIATION * median(abs(loss - middle) * math.sqrt(of / samples) for loss, of in self._usual)
        return middle + self._config.factor * max(deviation, _LEAST_DEVIATION * abs(middle))

    def is_spike(self, loss: float, *, samples: int, step: int) -> bool:
        """Return whether the loss of the interval up to update `step` is a spike; if not, add it to the recent ones."""
        if not math.isfinite(loss) or loss > self.limit(samples=samples):
            return True
        self._usual.append((loss, samples))
        self.good_step = step
        return False

    def rolled_back(self, step: int) -> None:
        """Count a rollback to update `step`."""
        self.rollbacks += 1
        self.good_step = step

    def state_dict(self) -> dict[str, Any]:
        """Return the recent losses and the counters."""
        return {
            "usual": [loss for loss, _ in self._usual],
            "samples": [samples for _, samples in self._usual],
            "rollbacks": self.rollbacks,
            "good_step": self.good_step,
        }

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Restore the recent losses and the counters."""
        usual = zip(state["usual"], state["samples"], strict=True)
        self._usual = deque(usual, maxlen=self._config.window)
        self.rollbacks, self.good_step = state["rollbacks"], state["good_step"]
