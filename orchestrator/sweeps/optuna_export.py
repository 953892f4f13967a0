"""A finished or running sweep as a study of Optuna, for its dashboard and for the importance of parameters."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, get_args

from headway.trainer.checkpoints.retention import Mode
from headway.trainer.errors import ConfigError

from ..config.loader import to_plain
from .objectives import objective_values
from .optuna_search import intermediate_values, required
from .space import Axis, Choice, Grid, LogUniform, RandInt, Uniform, When

if TYPE_CHECKING:
    from .record import TrialResult


def to_study(
    trials: Sequence[TrialResult],
    space: Mapping[str, Any],
    objectives: Mapping[str, Mode],
    *,
    storage: str | None,
    name: str,
) -> Any:
    """Return a new study with the ended trials of a sweep.

    Args:
        trials: the trials of the sweep.
        space: the space in its record.
        objectives: "min" or "max" by metric. A single one has the best value of a trial, several the last.
        storage: URL of an Optuna storage such as "sqlite:///sweeps.db"; None for memory.
        name: name of the study.

    Raises:
        ConfigError: Optuna is not installed, or the storage has a study of this name.
    """
    optuna = required()
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    directions = ["minimize" if mode == "min" else "maximize" for mode in objectives.values()]
    try:
        study = optuna.create_study(storage=storage, study_name=name, directions=directions)
    except optuna.exceptions.DuplicatedStudyError as error:
        raise ConfigError(f"{storage} already has a study {name!r}: pass another study_name") from error
    finally:
        optuna.logging.set_verbosity(verbosity)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.set_metric_names(list(objectives))
    found = {path: axis for path, plain in space.items() if isinstance(axis := _axis(plain), Axis)}
    ended = [trial for trial in trials if trial.has_ended]
    distributions = _distributions(optuna, found, ended)
    study.add_trials([_frozen(optuna, trial, distributions, objectives) for trial in ended])
    return study


def importances(study: Any) -> dict[str, float]:
    """Return how much of the metric's variance each parameter explains, the most important first.

    Of several objectives, the first counts. Empty if fewer than four trials have completed or no parameter varies, and
    if scikit-learn is missing.
    """
    optuna = required()
    completed = [trial for trial in study.get_trials(deepcopy=False) if trial.state.name == "COMPLETE"]
    if len(completed) < 4 or len({trial.values[0] for trial in completed}) < 2:
        return {}
    with suppress(ImportError, ValueError, RuntimeError):
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
        found = optuna.importance.get_param_importances(
            study, evaluator=evaluator, target=lambda trial: trial.values[0]
        )
        return dict(found)
    return {}


def _axis(plain: Any) -> Any:
    """Return an axis from its record, such as {"LogUniform": {"low": 1e-4, "high": 1e-1}}; other values unchanged."""
    if not isinstance(plain, Mapping) or len(plain) != 1:
        return plain
    ((kind, settings),) = plain.items()
    if kind == When.__name__:
        return _axis(settings["then"])
    cls = {each.__name__: each for each in get_args(Axis)}.get(kind)
    return plain if cls is None else cls(**settings)


def _distributions(optuna: Any, space: Mapping[str, Axis], trials: list[TrialResult]) -> dict[str, Any]:
    """Return the distributions of the axes, widened to the values that trials have."""
    found, kinds = {}, optuna.distributions
    for path, axis in space.items():
        values = [trial.values[path] for trial in trials if path in trial.values]
        match axis:
            case Choice(values=choices) | Grid(values=choices):
                names = dict.fromkeys(_category(each) for each in (*map(to_plain, choices), *values))
                found[path] = kinds.CategoricalDistribution(list(names))
            case RandInt(low=low, high=high, log=log):
                found[path] = kinds.IntDistribution(min([low, *values]), max([high, *values]), log=log)
            case Uniform(low=low, high=high) | LogUniform(low=low, high=high):
                is_log = isinstance(axis, LogUniform)
                found[path] = kinds.FloatDistribution(min([low, *values]), max([high, *values]), log=is_log)
            case _ if values:
                # A normal distribution has no limits.
                found[path] = kinds.FloatDistribution(min(values), max(values))
    return found


def _frozen(optuna: Any, trial: TrialResult, distributions: Mapping[str, Any], objectives: Mapping[str, Mode]) -> Any:
    states = optuna.trial.TrialState
    tried = trial.tried
    outcome: dict[str, Any] = {"state": states.FAIL}
    values = objective_values(tried.metrics, objectives) if len(objectives) > 1 else [tried.metric]
    if values is not None and tried.metric is not None and tried.state == "ended":
        outcome = {"state": states.COMPLETE, "values": values}
    elif tried.metric is not None and tried.state == "pruned":
        outcome = {
            "state": states.PRUNED,
            "value": tried.metric,
            "intermediate_values": intermediate_values(tried),
        }
    params = {path: _category(trial.values[path]) for path in distributions if path in trial.values}
    return optuna.trial.create_trial(
        params=params,
        distributions={path: distributions[path] for path in params},
        user_attrs={"trial": trial.name, "run_dir": trial.run_dir, "steps": trial.steps},
        **outcome,
    )


def _category(value: Any) -> Any:
    """Return a value as Optuna accepts it in a category: lists as text."""
    return value if value is None or isinstance(value, (bool, int, float, str)) else json.dumps(value)
