"""Schedulers, which stop trials of a sweep early or change them while they train. All count evaluations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

from headway.trainer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ASHA:
    """Asynchronous successive halving: stops trials that are worse than most others at the same rung.

    Rungs are at `grace` evaluations and `reduction` times the previous rung each. Source: Li et al. 2018, arXiv
    1810.05934.

    Attributes:
        grace: evaluations before a trial can be stopped.
        reduction: one in this many trials continues at each rung; also the factor between two rungs.
        max_evaluations: evaluations of a complete trial.

    Example:
        >>> ASHA(grace=2).reduction
        4
    """

    grace: int = 1
    reduction: float = 4
    max_evaluations: int = 100

    def __post_init__(self) -> None:
        check_positive_ints(self, "grace", "max_evaluations")
        _check_rungs(self)


@dataclass(frozen=True, kw_only=True)
class HyperBand:
    """Distributes trials over several `ASHA` brackets, each with a later first rung than the previous one.

    If early evaluations predict the final ones badly, `ASHA` alone stops good trials too early; here some trials always
    get more time. Asynchronous: no trial waits for others. The bracket sizes are those of Hyperband (Li et al. 2018,
    arXiv 1603.06560), the rule inside a bracket is that of ASHA (Li et al. 2020, arXiv 1810.05934).

    Attributes:
        grace: evaluations before a trial of the first bracket can be stopped.
        reduction: one in this many trials of a bracket continues at each rung; also the factor between two rungs, and
            between the first rungs of two brackets.
        max_evaluations: evaluations of a complete trial; no rung is later.
        brackets: number of brackets; None for the most that fit, the last of which stops no trial early.

    Example:
        >>> scheduler = HyperBand(max_evaluations=9)
        >>> scheduler.first_looks, [scheduler.bracket_of(index) for index in range(9)]
        ([1, 3, 9], [0, 0, 1, 0, 2, 0, 1, 0, 0])
    """

    grace: int = 1
    reduction: float = 3
    max_evaluations: int = 81
    brackets: int | None = None

    def __post_init__(self) -> None:
        check_positive_ints(self, "grace", "max_evaluations", "brackets")
        _check_rungs(self)
        if self.brackets is not None and self.brackets > self._most_brackets:
            raise ConfigError(
                f"brackets must be <= {self._most_brackets} with max_evaluations={self.max_evaluations}, "
                f"got {self.brackets}"
            )

    @property
    def first_looks(self) -> list[float]:
        """The first rung of each bracket, in evaluations."""
        return [self.grace * self.reduction**each for each in range(self.brackets or self._most_brackets)]

    def bracket_of(self, index: int) -> int:
        """Return the bracket of a trial, from 0; interleaved, so that each bracket has its share at any time."""
        # All brackets cost the same: s halvings, s + 1 rungs, reduction**s trials for each survivor.
        halvings = [self._most_brackets - 1 - each for each in range(len(self.first_looks))]
        shares = [self.reduction**s / (s + 1) for s in halvings]
        dealt = [0] * len(shares)
        bracket = 0
        for _ in range(index + 1):
            bracket = min(range(len(shares)), key=lambda each: (dealt[each] + 1) / shares[each])
            dealt[bracket] += 1
        return bracket

    @property
    def _most_brackets(self) -> int:
        return 1 + int(math.log(self.max_evaluations / self.grace) / math.log(self.reduction) + 1e-9)


@dataclass(frozen=True, kw_only=True)
class MedianStopping:
    """Stops a trial whose best value is worse than the median of the other trials' running means.

    Attributes:
        grace: evaluations before a trial can be stopped.
        trials: this many others must have come as far before one is stopped.

    Example:
        >>> MedianStopping(grace=5).trials
        3
    """

    grace: int = 1
    trials: int = 3

    def __post_init__(self) -> None:
        check_positive_ints(self, "grace", "trials")


@dataclass(frozen=True, kw_only=True)
class PBT:
    """Population based training: the worst trials resume from checkpoints of the best ones, with perturbed values.

    All trials train concurrently. Source: Jaderberg et al. 2017, arXiv 1711.09846.

    Attributes:
        vary: paths of the space that may change while a trial trains; empty for all `Uniform` and `LogUniform`.
        every: evaluations between two decisions.
        quantile: fraction of the trials that counts as best, and as worst.
        resample: probability of drawing a new value, instead of scaling the old one by 0.8 or 1.2.

    Example:
        >>> PBT(vary=("config.learning_rate",), every=2).quantile
        0.25
    """

    vary: tuple[str, ...] = ()
    every: int = 1
    quantile: float = 0.25
    resample: float = 0.25

    def __post_init__(self) -> None:
        check_positive_ints(self, "every")
        object.__setattr__(self, "vary", tuple(self.vary))
        if not 0 < self.quantile <= 0.5:
            raise ConfigError(f"quantile must be > 0 and <= 0.5, got {self.quantile!r}")
        if not 0 <= self.resample <= 1:
            raise ConfigError(f"resample must be a probability from 0 to 1, got {self.resample!r}")


Scheduler: TypeAlias = ASHA | HyperBand | MedianStopping | PBT


def is_tune_scheduler(value: Any) -> bool:
    """Return whether a value is a `TrialScheduler` of Ray Tune."""
    return is_from(value, "ray.tune.schedulers.trial_scheduler")


def tune_setting(scheduler: Any, name: str, default: Any) -> Any:
    """Return a setting of a scheduler of Ray Tune, or the default. Ray keeps settings in private attributes only."""
    return getattr(scheduler, f"_{name}", default)


def is_from(value: Any, module: str) -> bool:
    """Return whether a class of the value is defined in a module. Does not import it, because Ray takes a second."""
    return any(each.__module__ == module for each in type(value).__mro__)


def check_created(name: str, value: Any) -> None:
    """Check that a value is not a class.

    Raises:
        ConfigError: it is; the brackets were forgotten.
    """
    if isinstance(value, type):
        kind = value.__qualname__
        raise ConfigError(f"{name} must be an object, got the class {kind}: create it: {kind}(...)")


def _check_rungs(scheduler: ASHA | HyperBand) -> None:
    if not scheduler.reduction > 1:
        raise ConfigError(f"reduction must be > 1, got {scheduler.reduction!r}")
    if scheduler.grace > scheduler.max_evaluations:
        raise ConfigError(f"grace must be <= max_evaluations ({scheduler.max_evaluations}), got {scheduler.grace}")


def check_positive_ints(settings: Any, *names: str) -> None:
    """Check that fields of a dataclass are integers >= 1, or have their default, which may be None.

    Raises:
        ConfigError: one is not.
    """
    for name in names:
        value = getattr(settings, name)
        if value is not getattr(type(settings), name) and (type(value) is not int or value < 1):
            raise ConfigError(f"{name} must be an integer >= 1, got {value!r}")
