"""The axes of a search space, and how values are drawn from them. Arithmetic only."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np

from headway.trainer.errors import ConfigError

from ..config.loader import to_plain
from ..config.values import python_values


class _Number:
    """A number."""

    @property
    def is_log(self) -> bool:
        """Whether it is drawn on a logarithmic scale."""
        return isinstance(self, LogUniform) or getattr(self, "log", False)

    def encode(self, value: Any) -> Any:
        """Return a value as searchers get it: within the limits, which they check without a tolerance."""
        return self.snap(value)

    def decode(self, value: Any) -> Any:
        """Return the valid value for one that a searcher suggests: not all searchers know steps."""
        return self.snap(value)

    def snap(self, value: float) -> Any:
        """Return the nearest valid value."""
        raise NotImplementedError


@dataclass(frozen=True)
class _Range(_Number):
    """Numbers between two limits."""

    low: Any
    high: Any
    step: Any = None

    def __post_init__(self) -> None:
        _convert_numpy(self)
        name = type(self).__name__
        if not (is_number(self.low) and is_number(self.high)):
            raise ConfigError(f"{name}: low and high must be finite numbers, got {self.low!r} and {self.high!r}")
        if self.low == self.high:
            raise ConfigError(f"{name}: low and high are both {self.low!r}: use the value {self.low!r} itself")
        if self.low > self.high:
            raise ConfigError(f"{name}: low must be less than high, got {self.low!r} and {self.high!r}")
        if self.is_log and not self.low > 0:
            raise ConfigError(f"{name}: low must be > 0 on a logarithmic scale, got {self.low!r}")
        _check_step(self, self.step)
        if self.step is not None and self.step > self.high - self.low:
            raise ConfigError(f"{name}: step must be <= high - low ({self.high - self.low}), got {self.step!r}")

    def samples(self) -> tuple[Any, ...]:
        """Return typical values, for validation."""
        middle = math.sqrt(self.low * self.high) if self.is_log else self.low + 0.382 * (self.high - self.low)
        return (self.low, self.snap(middle), self.snap(self.high))

    def snap(self, value: float) -> Any:
        """Return the nearest valid value."""
        clamped = min(max(value, self.low), self.high)
        if self.step is None:
            return clamped
        return self._at(min(round((clamped - self.low) / self.step), self._num_steps))

    @property
    def _num_steps(self) -> int:
        """The number of steps between the limits."""
        return int((self.high - self.low) / self.step + 1e-9)

    def _at(self, step: int) -> Any:
        """Return the value after some steps, without the noise of repeated additions such as 0.30000000000000004."""
        value = self.low + step * self.step
        return value if type(value) is int else float(f"{value:.12g}")


@dataclass(frozen=True)
class _Values:
    """Values in a list."""

    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not isinstance(self.values, (list, tuple, range, np.ndarray)):
            raise ConfigError(f"{name}: values must be a list, got {self.values!r}")
        object.__setattr__(self, "values", tuple(self.values))
        _convert_numpy(self)
        if not self.values:
            raise ConfigError(f"{name}: values must not be empty")
        if nested := [each for each in self.values if _is_axis(each)]:
            raise ConfigError(
                f"{name}: values must not be axes, got one of {type(nested[0]).__name__}: list its values, or choose "
                "by another field and use When(path, value, axis)"
            )

    def samples(self) -> tuple[Any, ...]:
        """Return all values, for validation."""
        return self.values

    def encode(self, value: Any) -> int | None:
        """Return the place of a value, possibly read from a journal; searchers may not accept lists as categories."""
        text = json.dumps(to_plain(value))
        return next((place for place, each in enumerate(self.values) if json.dumps(to_plain(each)) == text), None)

    def decode(self, place: Any) -> Any:
        """Return the value at a place that a searcher suggests."""
        return self.values[int(place)]

    def snap(self, value: Any) -> Any:
        """Return it: `PBT` chooses among the values."""
        return value


@dataclass(frozen=True)
class Uniform(_Range):
    """A float with a uniform distribution.

    Attributes:
        low, high: limits, inclusive.
        step: distance between two values, counted from `low`; None for any value.

    Example:
        >>> Uniform(0.0, 0.5, step=0.1).samples()
        (0.0, 0.2, 0.5)
    """

    def draw(self, generator: random.Random) -> float:
        """Return a random value."""
        if self.step is None:
            return generator.uniform(self.low, self.high)
        return float(self._at(generator.randint(0, self._num_steps)))


@dataclass(frozen=True)
class LogUniform(_Range):
    """A float with a log-uniform distribution.

    Attributes:
        low, high: limits, inclusive; > 0.
        step: distance between two values, counted from `low`; None for any value.

    Example:
        >>> LogUniform(1e-4, 1e-1).low
        0.0001
    """

    def draw(self, generator: random.Random) -> float:
        """Return a random value."""
        return float(self.snap(math.exp(generator.uniform(math.log(self.low), math.log(self.high)))))


@dataclass(frozen=True)
class RandInt(_Range):
    """An integer with a uniform or log-uniform distribution.

    Attributes:
        low, high: limits, inclusive.
        step: distance between two values, counted from `low`.
        log: draw on a logarithmic scale, as for the size of a layer or a batch; then `low` must be >= 1.

    Example:
        >>> RandInt(8, 64, step=8).samples()
        (8, 64)
    """

    low: int
    high: int
    step: int = 1
    log: bool = False

    def __post_init__(self) -> None:
        _convert_numpy(self)
        if any(type(each) is not int for each in (self.low, self.high, self.step)):
            raise ConfigError(
                f"RandInt: low, high and step must be integers, got {self.low!r}, {self.high!r} and {self.step!r}"
            )
        super().__post_init__()

    def draw(self, generator: random.Random) -> int:
        """Return a random value."""
        if not self.log:
            return int(self._at(generator.randint(0, self._num_steps)))
        # As if all values that round to an integer were drawn, so that the limits are as likely as their neighbors.
        drawn = math.exp(generator.uniform(math.log(self.low - 0.5), math.log(self.high + 0.5)))
        return int(self.snap(drawn))

    def samples(self) -> tuple[int, ...]:
        """Return typical values, for validation."""
        return (self.low, self.snap(self.high))


@dataclass(frozen=True)
class Normal(_Number):
    """A float with a normal distribution; has no limits.

    Attributes:
        mean: its mean.
        std: its standard deviation.
        step: distance between two values, counted from `mean`; None for any value.

    Example:
        >>> Normal(0.0, 0.1).std
        0.1
    """

    mean: float
    std: float
    step: float | None = None

    def __post_init__(self) -> None:
        _convert_numpy(self)
        if not all(is_number(each) for each in (self.mean, self.std)) or self.std <= 0:
            raise ConfigError(
                f"Normal: mean and std must be finite numbers, std > 0, got {self.mean!r} and {self.std!r}"
            )
        _check_step(self, self.step)

    def draw(self, generator: random.Random) -> float:
        """Return a random value."""
        return self.snap(generator.gauss(self.mean, self.std))

    def samples(self) -> tuple[float, ...]:
        """Return typical values, for validation."""
        return (self.mean,)

    def snap(self, value: float) -> float:
        """Return the nearest valid value."""
        return value if self.step is None else self.mean + self.step * round((value - self.mean) / self.step)


@dataclass(frozen=True)
class Choice(_Values):
    """One of several values with equal probability; with `algorithm="grid"`, each of them.

    Attributes:
        values: the values; a nested list is one value.

    Example:
        >>> Choice([64, 128]).values
        (64, 128)
    """

    def draw(self, generator: random.Random) -> Any:
        """Return a random value."""
        return generator.choice(self.values)


@dataclass(frozen=True)
class Grid(_Values):
    """Each of several values in turn, while other axes are drawn at random.

    With several grids, each combination in turn. One trial per combination by default; set `trials` to a multiple of
    that to repeat the grid with other random values.

    Attributes:
        values: the values; a nested list is one value.

    Example:
        >>> search = Search(space={"config.width": Grid([64, 128]), "config.learning_rate": LogUniform(1e-4, 1e-1)})
        >>> search.num_trials, [search.suggest(index)["config.width"] for index in range(3)]
        (2, [64, 128, 64])
    """


Axis: TypeAlias = Uniform | LogUniform | RandInt | Normal | Choice | Grid


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
    then: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "then", as_axis(self.then))
        _convert_numpy(self)

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Return whether the axis applies, given the values drawn so far."""
        return self.path in values and values[self.path] in self.wanted

    @property
    def wanted(self) -> tuple[Any, ...]:
        """The values of the other axis for which this one applies."""
        return self.values if isinstance(self.values, tuple) else (self.values,)


def as_axis(value: Any) -> Any:
    """Return an axis for a list, for a domain of Ray Tune and for a distribution of Optuna; other values unchanged.

    Scalars of NumPy become Python numbers, because records have only these.

    Raises:
        ConfigError: the value is an axis of another library, or has no equivalent.
    """
    if isinstance(value, (list, np.ndarray)):
        return Choice(tuple(value))
    if isinstance(value, Mapping) and set(value) == {"grid_search"}:
        return Grid(value["grid_search"])
    library = _library_of(value)
    if library in ("ray", "optuna"):
        return (_from_tune if library == "ray" else _from_optuna)(value)
    if library in ("hyperopt", "scipy", "skopt", "ConfigSpace"):
        raise ConfigError(
            f"space: a {type(value).__name__} of {library} is not supported: use Uniform, LogUniform, RandInt, Normal "
            "or Choice, a domain of Ray Tune, or a distribution of Optuna"
        )
    return python_values(value)


def contains(axis: Any, value: Any) -> bool:
    """Return whether an axis, or a fixed value, can have a value."""
    if isinstance(axis, _Values):
        return axis.encode(value) is not None
    if isinstance(axis, _Number):
        is_type = type(value) is int if isinstance(axis, RandInt) else is_number(value)
        return is_type and math.isclose(axis.snap(value), value, rel_tol=1e-9, abs_tol=1e-12)
    return bool(to_plain(value) == to_plain(axis))


def _library_of(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _is_axis(value: Any) -> bool:
    is_grid = isinstance(value, Mapping) and set(value) == {"grid_search"}
    return is_grid or isinstance(value, (_Number, _Values, When)) or _library_of(value) in ("ray", "optuna")


def _from_tune(domain: Any) -> Axis:
    from ray.tune.search import sample

    if isinstance(domain, sample.Categorical):
        return Choice(tuple(domain.categories))
    if not isinstance(domain, (sample.Float, sample.Integer)):
        name = "sample_from" if isinstance(domain, sample.Function) else type(domain).__name__
        raise ConfigError(
            f"space: {name} of Ray Tune has no equivalent: use an axis, with When for a parameter "
            "that depends on another one, or compute the value in the trainer"
        )
    sampler, step = domain.get_sampler(), None
    if isinstance(sampler, sample.Quantized):
        sampler, step = sampler.get_sampler(), sampler.q
    is_log = isinstance(sampler, sample.LogUniform)
    if isinstance(domain, sample.Integer):
        return _integers_of_tune(domain.lower, domain.upper, step or 1, log=is_log)
    if isinstance(sampler, sample.Normal):
        if step is not None and not math.isclose(sampler.mean / step, round(sampler.mean / step), abs_tol=1e-9):
            raise ConfigError(
                f"space: qrandn({sampler.mean}, {sampler.sd}, {step}) draws multiples of {step}, but the steps of "
                f"Normal are counted from its mean: use a mean that is a multiple of {step}"
            )
        return Normal(sampler.mean, sampler.sd, step)
    # Ray Tune has checked that both limits are multiples of the step.
    return (LogUniform if is_log else Uniform)(domain.lower, domain.upper, step)


def _integers_of_tune(lower: int, upper: int, step: int, *, log: bool) -> RandInt:
    """Return the multiples of the step between two limits; with a step of 1, the upper one is exclusive."""
    low, high = -(-lower // step) * step, (upper // step * step if step != 1 else upper - 1)
    if low > high:
        ends = "no integer: its upper limit is exclusive" if step == 1 else f"no multiple of {step}"
        raise ConfigError(f"space: a domain of Ray Tune from {lower} to {upper} contains {ends}")
    if low == high:
        ends = ", because its upper limit is exclusive" if step == 1 else f", the only multiple of {step}"
        raise ConfigError(
            f"space: a domain of Ray Tune from {lower} to {upper} has only the value {low}{ends}: use {low} itself"
        )
    return RandInt(low, high, step=step, log=log)


def _from_optuna(distribution: Any) -> Axis:
    from optuna import distributions

    match distribution:
        case distributions.FloatDistribution(low=low, high=high, log=log, step=step):
            return LogUniform(low, high) if log else Uniform(low, high, step)
        case distributions.IntDistribution(low=low, high=high, log=log, step=step):
            return RandInt(low, high, step=step, log=log)
        case distributions.CategoricalDistribution(choices=choices):
            return Choice(tuple(choices))
    raise ConfigError(f"space: {type(distribution).__name__} of Optuna has no equivalent: use an axis such as Uniform")


def _convert_numpy(axis: Any) -> None:
    """Replace scalars of NumPy in the fields of an axis by Python numbers."""
    for each in fields(axis):
        object.__setattr__(axis, each.name, python_values(getattr(axis, each.name)))


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check_step(axis: Any, step: Any) -> None:
    if step is not None and not (is_number(step) and step > 0):
        raise ConfigError(f"{type(axis).__name__}: step must be > 0, got {step!r}")
