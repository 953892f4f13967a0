"""Suggestions by Optuna's TPE: a pure function of the earlier trials; nothing is stored here."""

from __future__ import annotations

import json
import math
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headway.trainer.checkpoints.retention import Mode
from headway.trainer.errors import ConfigError

from ..config.loader import to_plain
from .space import Axis, Choice, LogUniform, RandInt, Uniform, When


@dataclass(frozen=True, kw_only=True)
class PastTrial:
    """The state of an earlier trial.

    Attributes:
        values: its values by path, as plain data.
        state: "training" includes trials that have not started; "pruned" ones were stopped by a scheduler.
        metric: best value of the metric; None if none was finite.
        steps: completed updates.
    """

    values: Mapping[str, Any]
    state: Literal["training", "ended", "pruned", "failed"]
    metric: float | None = None
    steps: int = 0


def suggest(
    space: Mapping[str, Any], *, mode: Mode, seed: int, index: int, tried: Sequence[PastTrial]
) -> dict[str, Any]:
    """Return the values of a trial; equal arguments give equal values in any process.

    Suggestions are random until ten trials have ended. A running trial counts as bad (constant liar), so that
    concurrent trials differ; one that failed, or has no finite value, counts as worse than all others.

    Args:
        space: values and axes, by path.
        mode: "min" if lower is better.
        seed: seed of the search.
        index: index of the trial.
        tried: all earlier trials, in the order of their suggestions.

    Raises:
        ConfigError: Optuna is not installed.

    Source: tree-structured Parzen estimators, Bergstra et al. 2011, as in Optuna (Watanabe 2023, arXiv 2304.11127).
    """
    optuna = required()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        # `group` (joint estimates with conditional fields) is experimental.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(
            seed=zlib.crc32(f"{seed} {index}".encode()), multivariate=True, group=True, constant_liar=True
        )
    study = optuna.create_study(sampler=sampler, direction="minimize" if mode == "min" else "maximize")
    for each in tried:
        study.add_trial(_past_trial(optuna, space, each))
    trial = study.ask()
    values: dict[str, Any] = {}
    for path, axis in space.items():
        if isinstance(axis, When):
            if not axis.holds(values):
                continue
            axis = axis.then
        values[path] = _suggest_one(trial, path, axis)
    return values


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


def _past_trial(optuna: Any, space: Mapping[str, Any], tried: PastTrial) -> Any:
    axes = {path: axis.then if isinstance(axis, When) else axis for path, axis in space.items() if path in tried.values}
    axes = {path: axis for path, axis in axes.items() if isinstance(axis, Axis)}
    states = optuna.trial.TrialState
    outcome: dict[str, Any] = {"state": states.RUNNING}
    if tried.state == "ended" and tried.metric is not None:
        outcome = {"state": states.COMPLETE, "value": tried.metric}
    elif tried.state == "pruned" and tried.metric is not None:
        outcome = {"state": states.PRUNED, "intermediate_values": {tried.steps: tried.metric}}
    elif tried.state != "training":
        outcome = {"state": states.PRUNED, "intermediate_values": {0: math.nan}}
    return optuna.trial.create_trial(
        params={path: _to_optuna(axis, tried.values[path]) for path, axis in axes.items()},
        distributions={path: _distribution(optuna, axis) for path, axis in axes.items()},
        **outcome,
    )


def _distribution(optuna: Any, axis: Axis) -> Any:
    found = optuna.distributions
    match axis:
        case Uniform(low=low, high=high):
            return found.FloatDistribution(low, high)
        case LogUniform(low=low, high=high):
            return found.FloatDistribution(low, high, log=True)
        case RandInt(low=low, high=high):
            return found.IntDistribution(low, high)
        case Choice(values=values):
            # Optuna rejects lists as categories, so it chooses an index.
            return found.CategoricalDistribution(range(len(values)))


def _suggest_one(trial: Any, path: str, axis: Any) -> Any:
    match axis:
        case Uniform(low=low, high=high):
            return trial.suggest_float(path, low, high)
        case LogUniform(low=low, high=high):
            return trial.suggest_float(path, low, high, log=True)
        case RandInt(low=low, high=high):
            return trial.suggest_int(path, low, high)
        case Choice(values=values):
            return values[trial.suggest_categorical(path, range(len(values)))]
    return axis


def _to_optuna(axis: Axis, value: Any) -> Any:
    """Convert a value from the journal to Optuna's parameter: for a `Choice`, its index."""
    if not isinstance(axis, Choice):
        return value
    return [json.dumps(to_plain(each)) for each in axis.values].index(json.dumps(to_plain(value)))
