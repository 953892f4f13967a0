"""The axes of a search space, and how values are drawn from them. Arithmetic only."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any, TypeAlias

from headway.trainer.errors import ConfigError


@dataclass(frozen=True)
class Uniform:
    """A float with a uniform distribution.

    Attributes:
        low, high: limits, inclusive.

    Example:
        >>> Uniform(0.0, 0.5).high
        0.5
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_limits(self, self.low, self.high)

    def draw(self, generator: random.Random) -> float:
        """Return a random value."""
        return generator.uniform(self.low, self.high)

    def samples(self) -> tuple[float, ...]:
        """Return typical values, for validation."""
        return (self.low, self.low + 0.382 * (self.high - self.low), self.high)


@dataclass(frozen=True)
class LogUniform:
    """A float with a log-uniform distribution.

    Attributes:
        low, high: limits, inclusive; > 0.

    Example:
        >>> LogUniform(1e-4, 1e-1).low
        0.0001
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_limits(self, self.low, self.high)
        if not self.low > 0:
            raise ConfigError(f"LogUniform: low must be > 0, got {self.low!r}")

    def draw(self, generator: random.Random) -> float:
        """Return a random value."""
        drawn = math.exp(generator.uniform(math.log(self.low), math.log(self.high)))
        return min(max(drawn, self.low), self.high)

    def samples(self) -> tuple[float, ...]:
        """Return typical values, for validation."""
        return (self.low, math.sqrt(self.low * self.high), self.high)


@dataclass(frozen=True)
class RandInt:
    """An integer with a uniform distribution.

    Attributes:
        low, high: limits, inclusive.

    Example:
        >>> RandInt(1, 3).samples()
        (1, 3)
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        _check_limits(self, self.low, self.high)
        if type(self.low) is not int or type(self.high) is not int:
            raise ConfigError(f"RandInt: low and high must be integers, got {self.low!r} and {self.high!r}")

    def draw(self, generator: random.Random) -> int:
        """Return a random value."""
        return generator.randint(self.low, self.high)

    def samples(self) -> tuple[int, ...]:
        """Return typical values, for validation."""
        return (self.low, self.high)


@dataclass(frozen=True)
class Choice:
    """One of several values with equal probability; a grid tries each.

    Attributes:
        values: the values; a nested list is one value.

    Example:
        >>> Choice([64, 128]).values
        (64, 128)
    """

    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.values, (list, tuple, range)):
            raise ConfigError(f"Choice: values must be a list, got {self.values!r}")
        object.__setattr__(self, "values", tuple(self.values))
        if not self.values:
            raise ConfigError("Choice: values must not be empty")

    def draw(self, generator: random.Random) -> Any:
        """Return a random value."""
        return generator.choice(self.values)

    def samples(self) -> tuple[Any, ...]:
        """Return all values, for validation."""
        return self.values


Axis: TypeAlias = Uniform | LogUniform | RandInt | Choice


@dataclass(frozen=True)
class When:
    """An axis that applies only if another one has a certain value; otherwise the field keeps its default.

    Attributes:
        path: path of the other axis, which must come earlier in the space.
        values: its value, or a tuple of several.
        then: the conditional axis.

    Example:
        >>> When("config.schedule", "cosine", RandInt(0, 100)).holds({"config.schedule": "constant"})
        False
    """

    path: str
    values: Any
    then: Axis

    def holds(self, values: dict[str, Any]) -> bool:
        """Return whether the axis applies, given the values drawn so far."""
        return self.path in values and values[self.path] in self.wanted

    @property
    def wanted(self) -> tuple[Any, ...]:
        """The values of the other axis for which this one applies."""
        return self.values if isinstance(self.values, tuple) else (self.values,)


def _check_limits(axis: Any, low: Any, high: Any) -> None:
    name = type(axis).__name__
    for limit in (low, high):
        if not isinstance(limit, (int, float)) or isinstance(limit, bool) or not math.isfinite(limit):
            raise ConfigError(f"{name}: low and high must be finite numbers, got {low!r} and {high!r}")
    if not low < high:
        raise ConfigError(f"{name}: low must be less than high, got {low!r} and {high!r}")
