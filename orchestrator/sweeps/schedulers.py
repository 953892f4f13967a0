"""What ends trials of a sweep early, or changes them while they train. All of them count evaluations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from headway.trainer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ASHA:
    """Stops what is worse than most others after as many evaluations; asks at `grace` and at each multiple of it.

    Asynchronous successive halving (Li et al. 2018, arXiv 1810.05934).

    Attributes:
        grace: evaluations that every trial has.
        reduction: of so many trials one goes on; also the factor between the number of evaluations at which it asks.
        max_evaluations: as many as a trial has in the end.

    Example:
        >>> ASHA(grace=2).reduction
        4
    """

    grace: int = 1
    reduction: float = 4
    max_evaluations: int = 100
    pauses: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_positive_ints(self, "grace", "max_evaluations")
        if not self.reduction > 1:
            raise ConfigError(f"reduction is above 1, not {self.reduction!r}")
        _check_grace(self)


@dataclass(frozen=True, kw_only=True)
class HyperBand:
    """Deals the trials to several `ASHA`, each of which asks for the first time later than the one before it.

    Where first evaluations say little of the last ones, one `ASHA` ends good trials too early; here some trials always
    have the time to show. Asynchronous: no trial waits for others, unlike in the first Hyperband (Li et al. 2018, arXiv
    1603.06560); the sizes of the brackets are its own, the rule inside of one is that of Li et al. 2020 (arXiv
    1810.05934).

    Attributes:
        grace: evaluations that every trial has.
        reduction: of so many trials of a bracket one goes on; also the factor between two looks at them, and between
            the first looks of two brackets.
        max_evaluations: as many as a trial has in the end. No look comes later.
        brackets: how many; None: all that there is time for, the last of which ends no trial early.

    Example:
        >>> scheduler = HyperBand(max_evaluations=9)
        >>> scheduler.first_looks, [scheduler.bracket_of(index) for index in range(9)]
        ([1, 3, 9], [0, 0, 1, 0, 2, 0, 1, 0, 0])
    """

    grace: int = 1
    reduction: float = 3
    max_evaluations: int = 81
    brackets: int | None = None
    pauses: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_positive_ints(self, "grace", "max_evaluations", *(["brackets"] if self.brackets is not None else []))
        if not self.reduction > 1:
            raise ConfigError(f"reduction is above 1, not {self.reduction!r}")
        _check_grace(self)
        if self.brackets is not None and self.brackets > self._most_brackets:
            raise ConfigError(
                f"brackets is at most {self._most_brackets}: {self.max_evaluations} evaluations have no room for more"
            )

    @property
    def first_looks(self) -> list[float]:
        """By bracket, the number of evaluations at which it ends trials for the first time."""
        return [self.grace * self.reduction**each for each in range(self.brackets or self._most_brackets)]

    def bracket_of(self, index: int) -> int:
        """Return the bracket of a trial, from 0: in turn, so that each has its share at any time."""
        # Each bracket is to cost the same: s halvings, s + 1 looks, reduction**s trials for each that survives.
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
    """Stops what is worse at its best than the mean of half of the others was up to then.

    Attributes:
        grace: evaluations that every trial has.
        trials: so many others must be as far before any is stopped.

    Example:
        >>> MedianStopping(grace=5).trials
        3
    """

    grace: int = 1
    trials: int = 3
    pauses: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_positive_ints(self, "grace", "trials")


@dataclass(frozen=True, kw_only=True)
class PBT:
    """Lets the worst trials go on from a checkpoint of the best ones, with other values. All trials train at once.

    Population based training (Jaderberg et al. 2017, arXiv 1711.09846).

    Attributes:
        vary: paths of the space that may change while a trial trains; empty: all `Uniform` and `LogUniform`.
        every: evaluations between two such decisions.
        quantile: this share of the trials counts as the best, and as the worst.
        resample: how often a value is drawn anew, instead of being changed by a factor of 0.8 or 1.2.

    Example:
        >>> PBT(vary=("config.learning_rate",), every=2).quantile
        0.25
    """

    vary: tuple[str, ...] = ()
    every: int = 1
    quantile: float = 0.25
    resample: float = 0.25
    pauses: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_positive_ints(self, "every")
        object.__setattr__(self, "vary", tuple(self.vary))
        if not 0 < self.quantile <= 0.5:
            raise ConfigError(f"quantile is above 0 and at most 0.5, not {self.quantile!r}")
        if not 0 <= self.resample <= 1:
            raise ConfigError(f"resample is a probability, not {self.resample!r}")


Scheduler: TypeAlias = ASHA | HyperBand | MedianStopping | PBT


def _check_grace(scheduler: ASHA | HyperBand) -> None:
    if scheduler.grace > scheduler.max_evaluations:
        raise ConfigError(
            f"grace={scheduler.grace} is more than max_evaluations={scheduler.max_evaluations}, all that a trial has"
        )


def _check_positive_ints(scheduler: Scheduler, *names: str) -> None:
    for name in names:
        value = getattr(scheduler, name)
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name} is a whole number from 1, not {value!r}")
