"""What a sweep may try for one field, and how a value of it is drawn. Arithmetic only."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any, TypeAlias

from headway.trainer.errors import ConfigError


@dataclass(frozen=True)
class Uniform:
    """A number between two, each as likely.

    Attributes:
        low, high: the limits.

    Example:
        >>> Uniform(0.0, 0.5).high
        0.5
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_limits(self, self.low, self.high)

    def draw(self, generator: random.Random) -> float:
        """Return one."""
        return generator.uniform(self.low, self.high)

    def samples(self) -> tuple[float, ...]:
        """Return values that stand for all, to be checked."""
        return (self.low, self.low + 0.382 * (self.high - self.low), self.high)


@dataclass(frozen=True)
class LogUniform:
    """A number between two, each order of magnitude as likely.

    Attributes:
        low, high: the limits, above zero.

    Example:
        >>> LogUniform(1e-4, 1e-1).low
        0.0001
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_limits(self, self.low, self.high)
        if not self.low > 0:
            raise ConfigError(f"LogUniform begins above zero, not at {self.low!r}")

    def draw(self, generator: random.Random) -> float:
        """Return one."""
        drawn = math.exp(generator.uniform(math.log(self.low), math.log(self.high)))
        return min(max(drawn, self.low), self.high)

    def samples(self) -> tuple[float, ...]:
        """Return values that stand for all, to be checked."""
        return (self.low, math.sqrt(self.low * self.high), self.high)


@dataclass(frozen=True)
class RandInt:
    """A whole number between two, each as likely.

    Attributes:
        low, high: the first and the last one.

    Example:
        >>> RandInt(1, 3).samples()
        (1, 3)
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        _check_limits(self, self.low, self.high)
        if type(self.low) is not int or type(self.high) is not int:
            raise ConfigError(f"RandInt takes whole numbers, not {self.low!r} and {self.high!r}")

    def draw(self, generator: random.Random) -> int:
        """Return one."""
        return generator.randint(self.low, self.high)

    def samples(self) -> tuple[int, ...]:
        """Return values that stand for all, to be checked."""
        return (self.low, self.high)


@dataclass(frozen=True)
class Choice:
    """One of several values, each as likely; a grid takes them in turn.

    Attributes:
        values: what there is to choose from; a list among them is one value.

    Example:
        >>> Choice([64, 128]).values
        (64, 128)
    """

    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.values, (list, tuple, range)):
            raise ConfigError(f"Choice takes a list of values, not {self.values!r}")
        object.__setattr__(self, "values", tuple(self.values))
        if not self.values:
            raise ConfigError("Choice needs a value to choose")

    def draw(self, generator: random.Random) -> Any:
        """Return one."""
        return generator.choice(self.values)

    def samples(self) -> tuple[Any, ...]:
        """Return all values, to be checked."""
        return self.values


Axis: TypeAlias = Uniform | LogUniform | RandInt | Choice


@dataclass(frozen=True)
class When:
    """An axis that is there only where another one has a certain value; elsewhere the field stays as it is.

    Attributes:
        path: of the other one, which comes before this one in the space.
        values: one value, or a tuple of several.
        then: the axis.

    Example:
        >>> When("config.schedule", "cosine", RandInt(0, 100)).holds({"config.schedule": "constant"})
        False
    """

    path: str
    values: Any
    then: Axis

    def holds(self, values: dict[str, Any]) -> bool:
        """Return whether it is there, given the values so far."""
        return self.path in values and values[self.path] in self.wanted

    @property
    def wanted(self) -> tuple[Any, ...]:
        """The values of the other one with which it is there."""
        return self.values if isinstance(self.values, tuple) else (self.values,)


def _check_limits(axis: Any, low: Any, high: Any) -> None:
    name = type(axis).__name__
    for limit in (low, high):
        if not isinstance(limit, (int, float)) or isinstance(limit, bool) or not math.isfinite(limit):
            raise ConfigError(f"{name} lies between two numbers, not {low!r} and {high!r}")
    if not low < high:
        raise ConfigError(f"{name} goes from the lower number to the higher one, not from {low!r} to {high!r}")
