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
from .optuna_search import new_study, outcome, required
from .space import Axis, Choice, Grid, RandInt, When

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
    try:
        study = new_study(optuna, objectives, storage=storage, study_name=name)
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
    for trial in ended:
        params = {path: _category(trial.values[path]) for path in distributions if path in trial.values}
        frozen = optuna.trial.create_trial(
            params=params,
            distributions={path: distributions[path] for path in params},
            user_attrs={"trial": trial.name, "run_dir": trial.run_dir, "steps": trial.steps},
            **outcome(optuna, trial.tried, objectives),
        )
        study.add_trial(frozen)
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
        if isinstance(axis, (Choice, Grid)):
            names = dict.fromkeys(_category(each) for each in (*map(to_plain, axis.values), *values))
            found[path] = kinds.CategoricalDistribution(list(names))
        else:
            limits = [*axis.samples(), *values]
            kind = kinds.IntDistribution if isinstance(axis, RandInt) else kinds.FloatDistribution
            found[path] = kind(min(limits), max(limits), log=axis.is_log)
    return found


def _category(value: Any) -> Any:
    """Return a value as Optuna accepts it in a category: lists as text."""
    return value if value is None or isinstance(value, (bool, int, float, str)) else json.dumps(value)
