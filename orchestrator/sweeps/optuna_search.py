"""Suggestions by Optuna's TPE: a function of the earlier trials, with Optuna's study kept between suggestions."""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from headway.trainer.checkpoints.retention import Mode
from headway.trainer.errors import ConfigError

from .objectives import Constraint, objective_values
from .sampling import axis_of, sample
from .space import Axis, Choice, RandInt


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
        self._axes = {path: axis for path, found in space.items() if isinstance(axis := axis_of(found), Axis)}
        self._limits = {path: _distribution(self._optuna, axis) for path, axis in self._axes.items()}
        # The trials in the study, by their number there.
        self._known: dict[int, PastTrial] = {}
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
            trial = self._study.ask()
            values = sample(self._space, partial(self._suggest_one, trial), fixed or {})
        # The journal may round the values, so the trial enters the study from there.
        self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        return values

    def _suggest_one(self, trial: Any, path: str, axis: Any) -> Any:
        limits = self._limits[path]
        if isinstance(axis, Choice):
            return axis.decode(trial.suggest_categorical(path, limits.choices))
        suggest = trial.suggest_int if isinstance(axis, RandInt) else trial.suggest_float
        return axis.decode(suggest(path, limits.low, limits.high, step=limits.step, log=limits.log))

    def _update(self, tried: Sequence[PastTrial]) -> None:
        """Bring the study to the state of the trials. A new one would take 0.3 s after a thousand trials."""
        if self._study is None or not self._continues(tried):
            self._study, self._known = new_study(self._optuna, self._objectives), {}
        for (number, before), now in zip(self._known.items(), tried, strict=False):
            if now.state != before.state:
                self._tell(number, now)
            self._known[number] = now
        for each in tried[len(self._known) :]:
            self._known[len(self._study.get_trials(deepcopy=False))] = each
            params = {path: axis.encode(each.values[path]) for path, axis in self._axes.items() if path in each.values}
            limits = {path: self._limits[path] for path in params}
            trial = self._optuna.trial.create_trial(params=params, distributions=limits, **self._outcome(each))
            self._study.add_trial(trial)

    def _continues(self, tried: Sequence[PastTrial]) -> bool:
        """Return whether the trials may be those of the study at a later time."""
        return len(self._known) <= len(tried) and all(
            before == now or (before.state == "training" and before.values == now.values)
            for before, now in zip(self._known.values(), tried, strict=False)
        )

    def _tell(self, number: int, now: PastTrial) -> None:
        """Record the end of a trial in the study."""
        found = self._outcome(now)
        # In a study in memory, ids are numbers.
        trial = self._optuna.trial.Trial(self._study, number)
        for step, value in found.get("intermediate_values", {}).items():
            trial.report(value, step)
        for key, value in found.get("constraints", {}).items():
            trial.set_constraint(key, value)
        # A pruned trial gets its value from the intermediate ones.
        self._study.tell(number, found.get("values"), state=found["state"])

    def _outcome(self, tried: PastTrial) -> dict[str, Any]:
        """Return `outcome` as TPE is to see it."""
        states = self._optuna.trial.TrialState
        found = outcome(self._optuna, tried, self._objectives)
        if found["state"] == states.FAIL and len(self._objectives) == 1:
            # TPE ignores failed trials; among pruned ones, NaN ranks below all.
            found = {"state": states.PRUNED, "intermediate_values": {0: math.nan}}
        if self._constraints and tried.state != "training":
            # An argument of Optuna 5.
            found["constraints"] = {
                f"{each.metric} {each.limit:g}": each.violation(tried.metrics) for each in self._constraints
            }
        return found


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


def new_study(optuna: Any, objectives: Mapping[str, Mode], **settings: Any) -> Any:
    """Return a new study of some objectives."""
    directions = ["minimize" if mode == "min" else "maximize" for mode in objectives.values()]
    return optuna.create_study(directions=directions, **settings)


def outcome(optuna: Any, tried: PastTrial, objectives: Mapping[str, Mode]) -> dict[str, Any]:
    """Return the state and the values of a trial as arguments of `create_trial`."""
    states = optuna.trial.TrialState
    if tried.state == "training":
        return {"state": states.RUNNING}
    is_single = len(objectives) == 1
    best = None if tried.metric is None else [tried.metric]
    values = best if is_single else objective_values(tried.metrics, objectives)
    if tried.state == "ended" and values is not None:
        return {"state": states.COMPLETE, "values": values}
    if tried.state == "pruned" and tried.metric is not None and is_single:
        ranking = {tried.steps: tried.metric}
        return {"state": states.PRUNED, "value": tried.metric, "intermediate_values": ranking}
    return {"state": states.FAIL}


def _distribution(optuna: Any, axis: Any) -> Any:
    found = optuna.distributions
    if isinstance(axis, Choice):
        # Optuna rejects lists as categories, so it chooses an index.
        return found.CategoricalDistribution(range(len(axis.values)))
    kind = found.IntDistribution if isinstance(axis, RandInt) else found.FloatDistribution
    if axis.is_log:
        # Rounded afterwards: Optuna has no step on a logarithmic scale.
        return kind(axis.low, axis.high, log=True)
    return kind(axis.low, axis.snap(axis.high), step=axis.step)
