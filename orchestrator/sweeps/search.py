"""The definition of a search, its suggestions, and its validation."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias, get_args

from headway.trainer.checkpoints.retention import Mode
from headway.trainer.errors import ConfigError

from ..config.experiment import Experiment
from ..config.loader import override, parse_overrides, resolve
from ..config.target import load_named
from . import optuna_search
from .optuna_search import PastTrial
from .schedulers import PBT, Scheduler
from .space import Axis, Choice, LogUniform, RandInt, Uniform, When

Algorithm = Literal["random", "grid", "tpe"]
Params: TypeAlias = dict[str, Any]
"""Hyperparameters of a trial, by dotted path."""

# Random trials tried to find one in which a value is valid.
_MOST_SAMPLES = 50
_AXES = (Uniform, LogUniform, RandInt, Choice)


@dataclass(frozen=True, kw_only=True)
class Search:
    """The space, the metric and the budget of a sweep.

    Attributes:
        space: by dotted path, as in overrides: `Uniform`, `LogUniform`, `RandInt`, `Choice`, or one of these inside
            `When`. Any other value, also a list, is set in all trials.
        metric: name of a metric in the log; a trial is judged by its best value.
        mode: "min" if lower is better, "max" if higher is better.
        trials: number of trials; None for the whole grid, or 10.
        concurrent: the most trials at a time; None for as many as fit on the machines.
        algorithm: "random", "grid" (every combination of choices), or "tpe" (Optuna's, which learns from earlier
            trials; `pip install 'headway[optuna]'`).
        scheduler: stops trials early or changes them: `ASHA`, `HyperBand`, `MedianStopping`, `PBT`.
        seed: seed of the suggestions. The n-th is always the same; for "tpe" given equal earlier trials.
        keep_best_trials: keep the checkpoints of only this many of the best finished trials; None keeps all.

    Example:
        >>> search = Search(space={"config.learning_rate": LogUniform(1e-4, 1e-1)}, trials=20, seed=1)
        >>> search.suggest(3) == search.suggest(3)
        True
    """

    space: Mapping[str, Any]
    metric: str = "validation/loss"
    mode: Mode = "min"
    trials: int | None = None
    concurrent: int | None = None
    algorithm: Algorithm = "random"
    scheduler: Scheduler | None = None
    seed: int = 0
    keep_best_trials: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.space, Mapping) or not self.space:
            raise ConfigError(f"space must be a non-empty dict of axes by path, got {self.space!r}")
        object.__setattr__(self, "space", dict(self.space))
        for name, choices in (("mode", Mode), ("algorithm", Algorithm)):
            if (value := getattr(self, name)) not in get_args(choices):
                raise ConfigError(f"{name} must be one of {', '.join(get_args(choices))}, got {value!r}")
        for name in ("trials", "concurrent", "keep_best_trials"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} must be an integer >= 1, got {value!r}")
        if not isinstance(self.metric, str):
            raise ConfigError(f"metric must be one name, got {self.metric!r}: a search has one objective")
        if not self.metric.startswith(("validation/", "train/")):
            raise ConfigError(f"metric must start with 'validation/' or 'train/', got {self.metric!r}")
        if self.scheduler is not None and not isinstance(self.scheduler, get_args(Scheduler)):
            kinds = ", ".join(each.__name__ for each in get_args(Scheduler))
            raise ConfigError(f"scheduler must be one of {kinds}, got {self.scheduler!r}")
        if self.keep_best_trials is not None and isinstance(self.scheduler, PBT):
            raise ConfigError(
                "keep_best_trials cannot be used with PBT: it could delete a checkpoint that a trial resumes from"
            )
        if self.algorithm == "tpe" and isinstance(self.scheduler, PBT):
            raise ConfigError(
                "algorithm='tpe' cannot be used with PBT, which changes the values of trials while they train"
            )
        self._check_space()

    @property
    def num_trials(self) -> int:
        """Number of trials."""
        if self.algorithm == "grid":
            return min(len(self._grid), self.trials or len(self._grid))
        return self.trials or 10

    @property
    def varied(self) -> dict[str, Axis]:
        """The axes that `PBT` changes while trials train; empty for other schedulers."""
        if not isinstance(self.scheduler, PBT):
            return {}
        return {path: self.space[path] for path in self.scheduler.vary} or {
            path: axis for path, axis in self.space.items() if isinstance(axis, (Uniform, LogUniform))
        }

    def suggest(self, index: int, tried: Sequence[PastTrial] = ()) -> Params:
        """Return the values of a trial: a function of the seed, the index and, for "tpe", the earlier trials.

        Args:
            index: index of the trial, from 0.
            tried: the earlier trials in their current state.

        Raises:
            ConfigError: Optuna is needed but not installed.
        """
        if self.algorithm == "grid":
            return dict(self._grid[index])
        if self.algorithm == "tpe":
            return optuna_search.suggest(self.space, mode=self.mode, seed=self.seed, index=index, tried=tried)
        return self._sample(index)

    def _sample(self, index: int) -> Params:
        values: Params = {}
        for path, axis in self.space.items():
            if isinstance(axis, When) and not axis.holds(values):
                continue
            axis = axis.then if isinstance(axis, When) else axis
            # One generator per field, so that adding a field does not change the values of the others.
            values[path] = axis.draw(random.Random(f"{self.seed} {index} {path}")) if isinstance(axis, _AXES) else axis
        return values

    def grid(self) -> list[Params]:
        """Return all combinations of choices; the last field changes fastest."""
        return list(self._grid)

    @cached_property
    def _grid(self) -> list[Params]:
        # Cached: a million combinations take a second to make, and each trial needs them.
        grid: list[Params] = [{}]
        for path, axis in self.space.items():
            longer = []
            for values in grid:
                if isinstance(axis, When) and not axis.holds(values):
                    longer.append(values)
                    continue
                found = axis.then if isinstance(axis, When) else axis
                choices = found.values if isinstance(found, Choice) else (found,)
                longer += [{**values, path: value} for value in choices]
            grid = longer
        return grid

    def check(self, experiment: Experiment) -> None:
        """Check that the search fits an experiment.

        Raises:
            ConfigError: it does not; names the path, the value, and the nearest valid name.
        """
        if self.algorithm == "tpe":
            optuna_search.required()
        for path, axis in self.space.items():
            if path.split(".")[0] in ("name", "trainer", "storage"):
                raise ConfigError(
                    f"{path} cannot be searched: it is set by the sweep; use paths below config or retries"
                )
            found = axis.then if isinstance(axis, When) else axis
            for value in found.samples() if isinstance(found, _AXES) else (found,):
                self._check_value(experiment, path, value)
        if experiment.scaling.max_workers > 1 and (isinstance(self.scheduler, PBT) or self.metric.startswith("train/")):
            raise ConfigError(
                f"PBT and train/* metrics require single-worker trials (scaling.workers=1), got {experiment.scaling}: "
                "trials of several workers report evaluations without a checkpoint"
            )
        if experiment.scaling.evaluation_worker is not None:
            raise ConfigError(
                "scaling.evaluation_worker is not supported in sweeps, whose trials are judged by evaluations of their "
                "own: leave it out"
            )
        if any(path.split(".")[0] == "scaling" for path in self.space):
            raise ConfigError("scaling.* cannot be searched: all trials use the same resources")
        if self.metric.startswith("train/") and self.scheduler is not None and self.scheduler.pauses:
            raise ConfigError(
                f"{type(self.scheduler).__name__} decides by evaluations: metric must be a validation/* metric"
            )

    def _check_value(self, experiment: Experiment, path: str, value: Any) -> None:
        """Check that a value is valid in at least one trial."""
        wrong: ConfigError | None = None
        for conditions in self._conditions(path):
            # By itself, else with values of other axes: a width may be valid only for some numbers of heads.
            for others in ({}, *map(self._sample, range(_MOST_SAMPLES))):
                try:
                    override(experiment, {**others, **conditions, path: value})
                except ConfigError as error:
                    wrong = wrong or error
                else:
                    return
        raise ConfigError(f"space: {wrong}{_hint(value)}") from wrong

    def _conditions(self, path: str) -> list[Params]:
        """Return the values of other fields for which an axis applies, as alternatives."""
        axis = self.space[path]
        if not isinstance(axis, When):
            return [{}]
        return [{**above, axis.path: value} for above in self._conditions(axis.path) for value in axis.wanted]

    def trial(self, experiment: Experiment, name: str, values: Params) -> Experiment:
        """Return the experiment of one trial. Its run is in the folder of the sweep."""
        settings = self.settings(experiment, values)
        changed: Experiment = override(experiment, settings)
        return replace(changed, name=name, storage=experiment.run_dir)

    def settings(self, experiment: Experiment, values: Params) -> Params:
        """Return the values of a trial with the settings that the sweep needs."""
        return {**self._besides(experiment), **values}

    def _besides(self, experiment: Experiment) -> Params:
        if not self.metric.startswith("validation/"):
            return {}
        settings: Params = {"config.checkpoint.monitor": self.metric, "config.checkpoint.mode": self.mode}
        if self.scheduler is not None and self.scheduler.pauses:
            keep = experiment.config.checkpoint.keep_last
            settings["config.checkpoint.background"] = False
            settings["config.checkpoint.keep_last"] = keep if keep == "all" else max(keep, 4)
        return settings

    def _check_space(self) -> None:
        before: set[str] = set()
        for path, axis in self.space.items():
            if not isinstance(path, str) or not all(part.isidentifier() for part in path.split(".")):
                raise ConfigError(f"space: {path!r} is not a dotted path such as config.learning_rate")
            if isinstance(axis, When):
                if axis.path not in before:
                    raise ConfigError(f"{path} depends on {axis.path}, which must come before it in the space")
                if not isinstance(axis.then, _AXES):
                    raise ConfigError(f"{path}: When needs an axis such as Choice, got {axis.then!r}")
                self._check_occurs(path, axis)
            found = axis.then if isinstance(axis, When) else axis
            if self.algorithm == "grid" and isinstance(found, (Uniform, LogUniform, RandInt)):
                raise ConfigError(f"{path}: a grid needs Choice([...]), got a {type(found).__name__}")
            before.add(path)
        if not any(isinstance(axis, (*_AXES, When)) for axis in self.space.values()) and self.num_trials > 1:
            raise ConfigError(
                f"nothing in the space varies, so all {self.num_trials} trials would be equal: add an axis such as "
                f"LogUniform or Choice, or set trials=1{''.join({_hint(value): None for value in self.space.values()})}"
            )
        if isinstance(self.scheduler, PBT):
            axes = {path: axis for path, axis in self.space.items() if isinstance(axis, (*_AXES, When))}
            if unknown := [path for path in self.scheduler.vary if path not in axes]:
                raise ConfigError(f"PBT(vary=...) names {', '.join(unknown)}, for which the space has no axis")
            conditional = [axis for axis in axes.values() if isinstance(axis, When)]
            if tied := [path for path in self.varied if axes[path] in conditional] + [
                axis.path for axis in conditional if axis.path in self.varied
            ]:
                raise ConfigError(
                    f"PBT cannot vary {', '.join(tied)}, which depends on another field or on which one depends: the "
                    "fields of a trial would change while it trains; name other fields in PBT(vary=...)"
                )
            if not self.varied:
                raise ConfigError("PBT has nothing to vary: add a Uniform or LogUniform outside of When to the space")

    def _check_occurs(self, path: str, axis: When) -> None:
        """Check that a condition can hold."""
        above = self.space[axis.path]
        above = above.then if isinstance(above, When) else above
        if isinstance(above, (Uniform, LogUniform, RandInt)):
            return
        there = above.values if isinstance(above, Choice) else (above,)
        if never := [value for value in axis.wanted if value not in there]:
            raise ConfigError(
                f"{path} applies when {axis.path} is {' or '.join(map(repr, never))}, which never happens: its values "
                f"are {', '.join(map(repr, there))}"
            )


def _hint(value: Any) -> str:
    """Return how to write an axis, for a fixed value that was probably meant as one."""
    if isinstance(value, (list, tuple)):
        return f"; a list is one fixed value, write Choice({list(value)!r}) to choose from it"
    if type(value).__module__.startswith(("ray.tune", "optuna", "hyperopt")):
        return "; write Uniform, LogUniform, RandInt or Choice of headway.orchestrator for an axis"
    return ""


def resolve_search(target: str, overrides: Sequence[str], *, name: str = "search") -> tuple[Experiment, Search]:
    """Return the experiment of a target and the search in the same file, both with overrides.

    Args:
        target: a target as for `resolve`.
        overrides: such as "config.max_epochs=3" and "search.trials=20".
        name: name of the search in the file or module of the target.

    Raises:
        ConfigError: there is no such search, or an override is invalid.
    """
    of_search = [each.removeprefix("search.") for each in overrides if each.startswith("search.")]
    experiment = resolve(target, [each for each in overrides if not each.startswith("search.")])
    found = load_named(target, name)
    if not isinstance(found, Search):
        raise ConfigError(f"{name} in {target} must be a Search, got a {type(found).__name__}")
    values = parse_overrides(of_search)
    # The keys of the space contain dots: set one in all trials, and leave the others unchanged.
    fixed = {path.removeprefix("space."): values.pop(path) for path in list(values) if path.startswith("space.")}
    return experiment, override(found, {**values, **({"space": {**found.space, **fixed}} if fixed else {})}, "search")
