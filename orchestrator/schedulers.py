"""What ends trials of a sweep early, or changes them while they train. All of them count evaluations."""

from __future__ import annotations

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
        _whole(self, "grace", "max_evaluations")
        if not self.reduction > 1:
            raise ConfigError(f"reduction is above 1, not {self.reduction!r}")


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
        _whole(self, "grace", "trials")


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
        _whole(self, "every")
        object.__setattr__(self, "vary", tuple(self.vary))
        if not 0 < self.quantile <= 0.5:
            raise ConfigError(f"quantile is above 0 and at most 0.5, not {self.quantile!r}")
        if not 0 <= self.resample <= 1:
            raise ConfigError(f"resample is a probability, not {self.resample!r}")


Scheduler: TypeAlias = ASHA | MedianStopping | PBT


def _whole(scheduler: Scheduler, *names: str) -> None:
    for name in names:
        value = getattr(scheduler, name)
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name} is a whole number from 1, not {value!r}")
