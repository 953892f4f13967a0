"""Several objectives and constraints of a sweep: which trials are feasible, and which are not dominated."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from headway.trainer.checkpoints.retention import Mode
from headway.trainer.errors import ConfigError

T = TypeVar("T")

_CONSTRAINT = re.compile(r"(\S+)\s*(<=|>=)\s*(\S+)")
# For a trial that lacks the metric of a constraint.
_WORST = 1e30


@dataclass(frozen=True)
class Constraint:
    """A limit on a metric.

    Attributes:
        metric: name of the metric.
        is_upper: whether the limit is an upper one.
        limit: the limit.
    """

    metric: str
    is_upper: bool
    limit: float

    @classmethod
    def parse(cls, text: str) -> Constraint:
        """Return the constraint of a text such as "validation/latency <= 20".

        Raises:
            ConfigError: it is none.
        """
        match = _CONSTRAINT.fullmatch(text.strip()) if isinstance(text, str) else None
        try:
            return cls(match[1], match[2] == "<=", float(match[3]))  # type: ignore[index]
        except (TypeError, ValueError):
            raise ConfigError(f"constraints must be texts such as 'validation/latency <= 20', got {text!r}") from None

    def violation(self, metrics: Mapping[str, float]) -> float:
        """Return by how much the metrics exceed the limit; <= 0 if they do not."""
        value = metrics.get(self.metric)
        if value is None or math.isnan(value):
            return _WORST
        return min(value - self.limit if self.is_upper else self.limit - value, _WORST)


def constrained(constraints: Sequence[str]) -> tuple[str, ...]:
    """Return the metrics of constraints."""
    return tuple(Constraint.parse(each).metric for each in constraints)


def is_feasible(metrics: Mapping[str, float], constraints: Sequence[str]) -> bool:
    """Return whether metrics meet all constraints; a missing metric meets none."""
    return all(Constraint.parse(each).violation(metrics) <= 0 for each in constraints)


def objective_values(metrics: Mapping[str, float], objectives: Mapping[str, Mode]) -> list[float] | None:
    """Return the value of each objective; None if one is missing or not finite."""
    values = [metrics.get(name, math.nan) for name in objectives]
    return values if all(map(math.isfinite, values)) else None


def pareto(items: Sequence[tuple[T, Sequence[float]]], modes: Sequence[Mode]) -> list[T]:
    """Return the items that no other dominates: none is at least as good in all objectives and better in one.

    Args:
        items: each with its values.
        modes: "min" or "max" for each objective.
    """
    signs = [1 if mode == "min" else -1 for mode in modes]
    costs = [[sign * value for sign, value in zip(signs, values, strict=True)] for _, values in items]
    return [
        item
        for (item, _), own in zip(items, costs, strict=True)
        if not any(other != own and all(a <= b for a, b in zip(other, own, strict=True)) for other in costs)
    ]
