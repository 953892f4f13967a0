"""Suggestions by Optuna's TPE: a function of the earlier trials, with Optuna's study kept between suggestions."""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from headway.trainer.checkpoints.retention import Mode
from headway.trainer.errors import ConfigError

from .objectives import Constraint, objective_values
from .sampling import axis_of
from .space import Axis, Choice, LogUniform, RandInt, Uniform, When


@dataclass(frozen=True, kw_only=True)
class PastTrial:
    """The state of an earlier trial, from which a search learns.

    Attributes:
        values: its values by path, as plain data.
        state: "training" includes trials that have not started; "pruned" ones were stopped by a scheduler.
        metric: best value of the metric; None if none was finite.
        steps: completed updates.
        metrics: the last value of each metric.

    Example:
        >>> PastTrial(values={"config.learning_rate": 0.1}, state="ended", metric=0.5).metrics
        {}
    """

    values: Mapping[str, Any]
    state: Literal["training", "ended", "pruned", "failed"]
    metric: float | None = None
    steps: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


class TPE:
    """Optuna's TPE over a space. Equal arguments give equal suggestions in any process.

    Suggestions are random until ten trials have ended. A running trial counts as bad (constant liar), so that
    concurrent trials differ; one that failed, or has no finite value, counts as worse than all others.

    Args:
        space: values and axes, by path.
        objectives: "min" or "max" by metric. A single one is judged by the best value of a trial, several by the last.
        constraints: limits on metrics, which need Optuna 5.
        seed: seed of the search.

    Raises:
        ConfigError: Optuna is not installed.

    Source: tree-structured Parzen estimators, Bergstra et al. 2011, as in Optuna (Watanabe 2023, arXiv 2304.11127).
    """

    def __init__(
        self, space: Mapping[str, Any], *, objectives: Mapping[str, Mode], seed: int, constraints: Sequence[str] = ()
    ) -> None:
        self._optuna = required()
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        self._space, self._objectives, self._seed = space, objectives, seed
        self._constraints = [Constraint.parse(each) for each in constraints]
        self._known: list[PastTrial] = []
        # Trials of the study by their place in `_known`.
        self._numbers: list[int] = []
        self._study: Any = None

    def suggest(self, index: int, tried: Sequence[PastTrial], fixed: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the values of a trial.

        Args:
            index: index of the trial.
            tried: all earlier trials, in the order of their suggestions.
            fixed: values that the trial must have, by path.
        """
        self._update(tried)
        with warnings.catch_warnings():
            # `group` (joint estimates with conditional fields) is experimental.
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            # A new sampler for each suggestion, so that it does not depend on the earlier ones.
            self._study.sampler = self._optuna.samplers.TPESampler(
                seed=zlib.crc32(f"{self._seed} {index}".encode()), multivariate=True, group=True, constant_liar=True
            )
            if fixed:
                self._study.enqueue_trial(
                    {path: axis.encode(fixed[path]) for path, axis in _axes(self._space, fixed).items()}
                )
            trial = self._study.ask()
            values: dict[str, Any] = {}
            for path, found in self._space.items():
                if not isinstance(found, When) or found.holds(values):
                    axis = axis_of(found)
                    values[path] = _suggest_one(self._optuna, trial, path, axis) if isinstance(axis, Axis) else axis
        # The journal may round the values, so the trial enters the study from there.
        self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        return values

    def _update(self, tried: Sequence[PastTrial]) -> None:
        """Bring the study to the state of the trials. A new one would take 0.3 s after a thousand trials."""
        if self._study is None or not self._continues(tried):
            directions = ["minimize" if mode == "min" else "maximize" for mode in self._objectives.values()]
            self._study = self._optuna.create_study(directions=directions)
            self._known, self._numbers = [], []
        for before, now, number in zip(self._known, tried, self._numbers, strict=False):
            if now.state != before.state:
                self._tell(number, now)
        for each in tried[len(self._known) :]:
            self._numbers.append(len(self._study.get_trials(deepcopy=False)))
            self._study.add_trial(self._past_trial(each))
        self._known = list(tried)

    def _continues(self, tried: Sequence[PastTrial]) -> bool:
        """Return whether the trials may be those of the study at a later time."""
        return len(self._known) <= len(tried) and all(
            before == now or (before.state == "training" and before.values == now.values)
            for before, now in zip(self._known, tried, strict=False)
        )

    def _tell(self, number: int, now: PastTrial) -> None:
        """Record the end of a trial in the study."""
        # In a study in memory, ids are numbers.
        trial = self._optuna.trial.Trial(self._study, number)
        state, values, intermediate = self._outcome(now)
        for step, value in intermediate.items():
            trial.report(value, step)
        for key, value in self._violations(now).items():
            trial.set_constraint(key, value)
        self._study.tell(number, values, state=state)

    def _outcome(self, tried: PastTrial) -> tuple[Any, list[float] | None, dict[int, float]]:
        """Return the state of a trial in the study, its values, and the intermediate values that rank a pruned one."""
        states = self._optuna.trial.TrialState
        if tried.state == "training":
            return states.RUNNING, None, {}
        if len(self._objectives) > 1:
            values = objective_values(tried.metrics, self._objectives) if tried.state == "ended" else None
            return (states.FAIL, None, {}) if values is None else (states.COMPLETE, values, {})
        if tried.state == "ended" and tried.metric is not None:
            return states.COMPLETE, [tried.metric], {}
        return states.PRUNED, None, intermediate_values(tried)

    def _violations(self, tried: PastTrial) -> dict[str, float]:
        if tried.state == "training":
            return {}
        return {f"{each.metric} {each.limit:g}": each.violation(tried.metrics) for each in self._constraints}

    def _past_trial(self, tried: PastTrial) -> Any:
        axes = _axes(self._space, tried.values)
        state, values, intermediate = self._outcome(tried)
        violations = self._violations(tried)
        return self._optuna.trial.create_trial(
            params={path: axis.encode(tried.values[path]) for path, axis in axes.items()},
            distributions={path: _distribution(self._optuna, axis) for path, axis in axes.items()},
            state=state,
            values=values,
            intermediate_values=intermediate,
            # An argument of Optuna 5.
            **({"constraints": violations} if violations else {}),
        )


def required() -> Any:
    """Return the module `optuna`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise ConfigError(
            f"algorithm='tpe' needs Optuna, which cannot be imported ({error}): pip install 'headway[optuna]', or use "
            "algorithm='random'"
        ) from error
    return optuna


def _axes(space: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Axis]:
    """Return the axes of the space that a trial with these values has."""
    axes = {path: axis_of(axis) for path, axis in space.items() if path in values}
    return {path: axis for path, axis in axes.items() if isinstance(axis, Axis)}


def intermediate_values(tried: PastTrial) -> dict[int, float]:
    """Return the values that rank a pruned trial; NaN ranks below all."""
    pruned = tried.state == "pruned" and tried.metric is not None
    return {tried.steps: tried.metric or 0.0} if pruned else {0: math.nan}


def _distribution(optuna: Any, axis: Axis) -> Any:
    found = optuna.distributions
    match axis:
        case Uniform(low=low, step=step):
            return found.FloatDistribution(low, axis.snap(axis.high), step=step)
        case LogUniform(low=low, high=high):
            # Rounded afterwards: Optuna has no step on a logarithmic scale.
            return found.FloatDistribution(low, high, log=True)
        case RandInt(low=low, high=high, log=True):
            return found.IntDistribution(low, high, log=True)
        case RandInt(low=low, step=step):
            return found.IntDistribution(low, axis.snap(axis.high), step=step)
        case Choice(values=values):
            # Optuna rejects lists as categories, so it chooses an index.
            return found.CategoricalDistribution(range(len(values)))
    raise ConfigError(f"algorithm='tpe' cannot search {type(axis).__name__}")


def _suggest_one(optuna: Any, trial: Any, path: str, axis: Axis) -> Any:
    limits = _distribution(optuna, axis)
    if isinstance(axis, Choice):
        return axis.decode(trial.suggest_categorical(path, limits.choices))
    suggest = trial.suggest_int if isinstance(axis, RandInt) else trial.suggest_float
    return axis.decode(suggest(path, limits.low, limits.high, step=limits.step, log=limits.log))
