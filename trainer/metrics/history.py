"""Means over whole epochs, combined from the records of the log."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

from ..distributed.world import World
from .means import MeanMetrics
from .reductions import Reduce


class History:
    """Means over whole epochs, combined from the records of the log; saved in checkpoints, equal on every rank.

    Attributes:
        epochs: one dict per completed epoch.
        latest: the last value of every metric.
        dropped_samples: number of samples left out of the current epoch.
    """

    def __init__(self) -> None:
        self.epochs: list[dict[str, float]] = []
        self.latest: dict[str, float] = {}
        self.dropped_samples = 0
        self._training = MeanMetrics()
        self._evaluation: dict[str, float] = {}

    def add(
        self, record: Mapping[str, float], *, samples: int, kinds: Mapping[str, Reduce], weights: Mapping[str, float]
    ) -> None:
        """Add the training metrics of an interval to the epoch; values that are not finite are left out.

        Args:
            record: metrics by name.
            samples: number of samples in the interval, the weight of means that are not in `weights`.
            kinds: reductions of the metrics that are not means.
            weights: total weight of each mean, such as samples or tokens.
        """
        self.latest.update(record)
        for name, value in record.items():
            if name.startswith("train/") and math.isfinite(value):
                weight = 1 if name in kinds else weights.get(name, samples)
                self._training.log(name, value, weight, kinds.get(name, "mean"))

    def add_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Add the result of an evaluation."""
        self.latest.update(metrics)
        self._evaluation.update(metrics)

    def end_epoch(self, *, epoch: int, step: int) -> dict[str, float]:
        """End the epoch; return its metrics, and the number of dropped samples if there are any."""
        dropped = {"dropped_samples": float(self.dropped_samples)} if self.dropped_samples else {}
        row = {"epoch": float(epoch), "step": float(step), **self.so_far(), **dropped}
        self.epochs.append(row)
        self._training, self._evaluation, self.dropped_samples = MeanMetrics(), {}, 0
        return row

    def rewind(self, step: int) -> None:
        """Remove the epochs that ended after update `step`, to which the run has rolled back."""
        self.epochs = [row for row in self.epochs if row["step"] <= step]

    def so_far(self) -> dict[str, float]:
        """Return the metrics of the current epoch until now."""
        return copy.deepcopy(self._training).read(World.single("cpu")) | self._evaluation

    def state_dict(self) -> dict[str, Any]:
        """Return the completed epochs and the state of the current one."""
        return {
            "epochs": self.epochs,
            "latest": self.latest,
            "training": self._training.state_dict(),
            "evaluation": self._evaluation,
            "dropped_samples": self.dropped_samples,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.epochs, self.latest = list(state["epochs"]), dict(state["latest"])
        self._training.load_state_dict(state["training"])
        self._evaluation = dict(state["evaluation"])
        self.dropped_samples = state["dropped_samples"]
