"""What a sweep looks for and how: one frozen object, the values that it suggests, and what can be wrong with it."""

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
"""What a trial tries, by dotted path."""

# So many random trials are looked at for one in which a value can be.
_MOST_SAMPLES = 50
_AXES = (Uniform, LogUniform, RandInt, Choice)


@dataclass(frozen=True, kw_only=True)
class Search:
    """What to vary, what to look at, and how long.

    Attributes:
        space: by the dotted paths of overrides: `Uniform`, `LogUniform`, `RandInt`, `Choice`, or one of them inside of
            `When`. Any other value, a list too, is set in all trials.
        metric: the name of a metric in the log; of its values in a trial the best one counts.
        mode: "min" where lower is better, "max" where higher is.
        trials: how many; None: the whole grid, or 10.
        concurrent: how many train at once; None: as many as there are machines for.
        algorithm: "random"; "grid": every combination of choices; or "tpe": by what earlier trials came to, with Optuna
            (`pip install 'headway[optuna]'`).
        scheduler: what ends trials early, or changes them: `ASHA`, `HyperBand`, `MedianStopping`, `PBT`.
        seed: of the suggestions: the n-th one is always the same, for "tpe" if earlier trials are.
        keep_best_trials: the checkpoints of so many of the best finished trials stay, those of others are deleted; None
            deletes none.

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
            raise ConfigError(f"space says what to vary, by path, not {self.space!r}")
        object.__setattr__(self, "space", dict(self.space))
        for name, choices in (("mode", Mode), ("algorithm", Algorithm)):
            if (value := getattr(self, name)) not in get_args(choices):
                raise ConfigError(f"{name} is one of {', '.join(get_args(choices))}, not {value!r}")
        for name in ("trials", "concurrent", "keep_best_trials"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} is a whole number from 1, not {value!r}")
        if not self.metric.startswith(("validation/", "train/")):
            raise ConfigError(f'metric is the name of a metric in the log, as "validation/loss", not {self.metric!r}')
        if self.scheduler is not None and not isinstance(self.scheduler, get_args(Scheduler)):
            kinds = ", ".join(each.__name__ for each in get_args(Scheduler))
            raise ConfigError(f"scheduler is one of {kinds}, not {self.scheduler!r}")
        if self.keep_best_trials is not None and isinstance(self.scheduler, PBT):
            raise ConfigError("keep_best_trials deletes what a trial of PBT may be about to go on from: leave it out")
        if self.algorithm == "tpe" and isinstance(self.scheduler, PBT):
            raise ConfigError(
                "PBT changes what trials try while they train, so that tpe has nothing to learn from them"
            )
        self._check_space()

    @property
    def num_trials(self) -> int:
        """How many trials there will be."""
        if self.algorithm == "grid":
            return min(len(self._grid), self.trials or len(self._grid))
        return self.trials or 10

    @property
    def varied(self) -> dict[str, Axis]:
        """The axes that a `PBT` changes while trials train."""
        if not isinstance(self.scheduler, PBT):
            return {}
        return {path: self.space[path] for path in self.scheduler.vary} or {
            path: axis for path, axis in self.space.items() if isinstance(axis, (Uniform, LogUniform))
        }

    def suggest(self, index: int, tried: Sequence[PastTrial] = ()) -> Params:
        """Return what a trial is to try: a function of the seed and the index, and for "tpe" of what came of others.

        Args:
            index: of the trial, from 0.
            tried: the trials before it, as far as they are.

        Raises:
            ConfigError: Optuna is needed and not installed.
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
            # One stream for each field: a field more does not change what is tried for the others.
            values[path] = axis.draw(random.Random(f"{self.seed} {index} {path}")) if isinstance(axis, _AXES) else axis
        return values

    def grid(self) -> list[Params]:
        """Return all combinations of choices, the last field changing fastest."""
        return list(self._grid)

    @cached_property
    def _grid(self) -> list[Params]:
        # A million of them take a second to make, and are asked for at each trial.
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
        """Refuse what no trial of an experiment could be.

        Raises:
            ConfigError: names the path, the value, and the nearest valid name.
        """
        if self.algorithm == "tpe":
            optuna_search.required()
        for path, axis in self.space.items():
            if path.split(".")[0] in ("name", "trainer", "storage"):
                raise ConfigError(f"{path} is the sweep's own: a space has paths below config and retries")
            found = axis.then if isinstance(axis, When) else axis
            for value in found.samples() if isinstance(found, _AXES) else (found,):
                self._check_value(experiment, path, value)
        if experiment.scaling.max_workers > 1 and (isinstance(self.scheduler, PBT) or self.metric.startswith("train/")):
            raise ConfigError(
                f"PBT and train/* metrics require single-worker trials (scaling.workers=1), got {experiment.scaling}: "
                "trials of several workers report evaluations without a checkpoint"
            )
        if any(path.split(".")[0] == "scaling" for path in self.space):
            raise ConfigError("scaling.* cannot be searched: all trials use the same resources")
        if self.metric.startswith("train/") and self.scheduler is not None and self.scheduler.pauses:
            raise ConfigError(
                f"{type(self.scheduler).__name__} decides by evaluations: metric must be a validation/* metric"
            )

    def _check_value(self, experiment: Experiment, path: str, value: Any) -> None:
        """Refuse a value with which no trial could train, whatever it tries besides."""
        wrong: ConfigError | None = None
        for conditions in self._conditions(path):
            # Alone, or else beside what trials may try: a width that only some numbers of heads take.
            for others in ({}, *map(self._sample, range(_MOST_SAMPLES))):
                try:
                    override(experiment, {**others, **conditions, path: value})
                except ConfigError as error:
                    wrong = wrong or error
                else:
                    return
        raise ConfigError(f"space: {wrong}") from wrong

    def _conditions(self, path: str) -> list[Params]:
        """Return the ways in which an axis can be there: what other fields must be."""
        axis = self.space[path]
        if not isinstance(axis, When):
            return [{}]
        return [{**above, axis.path: value} for above in self._conditions(axis.path) for value in axis.wanted]

    def trial(self, experiment: Experiment, name: str, values: Params) -> Experiment:
        """Return the experiment of one trial, whose run lies in the folder of the sweep."""
        settings = self.settings(experiment, values)
        changed: Experiment = override(experiment, settings)
        return replace(changed, name=name, storage=experiment.run_dir)

    def settings(self, experiment: Experiment, values: Params) -> Params:
        """Return the values of a trial, and what it is told besides, for the sake of the sweep."""
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
                raise ConfigError(f"{path!r} is no path: write it as in config.learning_rate")
            if isinstance(axis, When):
                if axis.path not in before:
                    raise ConfigError(f"{path} depends on {axis.path}, which must come before it in the space")
                if not isinstance(axis.then, _AXES):
                    raise ConfigError(f"{path}: When takes an axis such as Choice, not {axis.then!r}")
                self._check_occurs(path, axis)
            found = axis.then if isinstance(axis, When) else axis
            if self.algorithm == "grid" and isinstance(found, (Uniform, LogUniform, RandInt)):
                raise ConfigError(f"{path} is a {type(found).__name__}, which has no end: a grid takes Choice([...])")
            before.add(path)
        if not any(isinstance(axis, (*_AXES, When)) for axis in self.space.values()) and self.num_trials > 1:
            raise ConfigError(
                f"nothing in the space varies, so that {self.num_trials} trials would be one and the same: give it an "
                "axis such as LogUniform or Choice, or trials=1"
            )
        if isinstance(self.scheduler, PBT):
            axes = {path: axis for path, axis in self.space.items() if isinstance(axis, (*_AXES, When))}
            if unknown := [path for path in self.scheduler.vary if path not in axes]:
                raise ConfigError(f"PBT varies {', '.join(unknown)}, which the space has no axis for")
            conditional = [axis for axis in axes.values() if isinstance(axis, When)]
            if tied := [path for path in self.varied if axes[path] in conditional] + [
                axis.path for axis in conditional if axis.path in self.varied
            ]:
                raise ConfigError(
                    f"PBT varies {', '.join(tied)}, which another field depends on or which depends on another one: "
                    "what is there would change while a trial trains; name other fields in PBT(vary=...)"
                )
            if not self.varied:
                raise ConfigError(
                    "PBT has nothing to vary: give the space a Uniform or a LogUniform that is no part of a When"
                )

    def _check_occurs(self, path: str, axis: When) -> None:
        """Refuse a condition that never holds."""
        above = self.space[axis.path]
        above = above.then if isinstance(above, When) else above
        if isinstance(above, (Uniform, LogUniform, RandInt)):
            return
        there = above.values if isinstance(above, Choice) else (above,)
        if never := [value for value in axis.wanted if value not in there]:
            raise ConfigError(
                f"{path} is there when {axis.path} is {' or '.join(map(repr, never))}, which it never is: it is one of "
                f"{', '.join(map(repr, there))}"
            )


def resolve_search(target: str, overrides: Sequence[str], *, name: str = "search") -> tuple[Experiment, Search]:
    """Return the experiment of a target, and the search that its file has beside it, both with their overrides.

    Args:
        target: what `resolve` takes.
        overrides: as "config.max_epochs=3" and "search.trials=20".
        name: of the search in the file or module of the target.

    Raises:
        ConfigError: there is none, or an override is wrong.
    """
    of_search = [each.removeprefix("search.") for each in overrides if each.startswith("search.")]
    experiment = resolve(target, [each for each in overrides if not each.startswith("search.")])
    found = load_named(target, name)
    if not isinstance(found, Search):
        raise ConfigError(f"{name} in {target} is a {type(found).__name__}, not a Search")
    values = parse_overrides(of_search)
    # The paths of the space have dots of their own: one of them is set in all trials, the others stay as they are.
    fixed = {path.removeprefix("space."): values.pop(path) for path in list(values) if path.startswith("space.")}
    return experiment, override(found, {**values, **({"space": {**found.space, **fixed}} if fixed else {})}, "search")
