"""The definition of a search, its suggestions, and its validation."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, get_args

from headway.trainer.checkpoints.retention import Mode
from headway.trainer.errors import ConfigError
from headway.trainer.loop.progress import Duration

from ..config.experiment import Experiment
from ..config.loader import override, parse_overrides, resolve, to_plain
from ..config.scaling import Scaling
from ..config.target import load_named
from ..config.values import python_values
from . import optuna_search
from .objectives import Constraint
from .optuna_search import TPE, PastTrial
from .sampling import Params, combinations, conditions, sample, samples_of
from .schedulers import PBT, Scheduler, check_created, check_positive_ints, is_from, is_tune_scheduler, tune_setting
from .space import Axis, Grid, LogUniform, Uniform, When, as_axis, is_number
from .space_checks import check_point, check_space, check_varied

# What the schedulers and stoppers of Ray Tune can count. Ray Tune adds all but the first three.
_REPORTED = (
    "evaluations", "step", "training_iteration", "time_total_s", "time_this_iter_s", "time_since_restore",
    "iterations_since_restore", "timestamp",
)  # fmt: skip
_ALGORITHMS = ("random", "grid", "tpe")
# Random trials tried to find one in which a value is valid.
_MOST_SAMPLES = 50
# Fields that may differ when a sweep is resumed.
MUTABLE = frozenset((
    "trials", "concurrent", "keep_best_trials", "max_checkpoint_bytes", "time_budget", "patience", "target",
    "callbacks", "stop",
))  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Search:
    """The space, the metric and the budget of a sweep.

    Attributes:
        space: by dotted path, as in overrides: `Uniform`, `LogUniform`, `RandInt`, `Normal`, `Choice` or `Grid`, a
            domain of Ray Tune (`tune.loguniform(1e-4, 1e-1)`), a distribution of Optuna, a list to choose from, or one
            of these inside `When`. Any other value is set in all trials.
        metric: name of a metric in the log; a trial is judged by its best value.
        mode: "min" if lower is better, "max" if higher is better.
        objectives: further metrics, each "min" or "max". The result has the trials that no other one dominates
            (`SweepResult.pareto`). Judged by the last value of each metric.
        constraints: limits on the last values of metrics, such as "validation/latency <= 20"; a trial that violates one
            is not the best.
        trials: number of trials; None for each combination of the grid, or 10.
        concurrent: the most trials at a time; None for as many as fit on the machines.
        algorithm: "random"; "grid" (every combination of choices); "tpe" (Optuna's, which learns from earlier trials;
            `pip install 'headway[optuna]'`); a `Searcher` of Ray Tune; or an object with a method
            `suggest(index, tried)` that returns values by path, given the earlier trials as a list of `PastTrial`.
        scheduler: stops trials early or changes them: `ASHA`, `HyperBand`, `MedianStopping`, `PBT`, or a
            `TrialScheduler` of Ray Tune.
        seed: seed of the suggestions. The n-th is always the same; for "tpe" given equal earlier trials.
        points: values to begin with, by path; the first trials have them. Fields that a point leaves out are suggested.
        keep_best_trials: keep the checkpoints of only this many of the best finished trials; None keeps all.
        max_checkpoint_bytes: whenever a trial ends, delete the checkpoints of the worst finished trials until those of
            finished trials are within this limit, such as 20e9. The best trial keeps its own.
        warm_start: folders of sweeps from whose ended trials the algorithm learns before the first suggestion. They
            must have the same metric and mode; trials with values outside of this space are left out.
        time_budget: how long a start of the sweep may take, such as "2h". Then running trials save a checkpoint, and
            the sweep ends as "time_limit"; the same command resumes it.
        patience: start no more trials when this many in a row have ended without a new best.
        target: end the sweep when an evaluation is as good as this.
        stop: when to end a trial, as in `ray.tune.RunConfig`: {"evaluations": 20}, a function of the trial and its
            report, or a `Stopper`. Reports have the metric, "evaluations" and "step". The trial saves a checkpoint.
        callbacks: callbacks of Ray Tune.

    Example:
        >>> search = Search(space={"config.learning_rate": LogUniform(1e-4, 1e-1)}, trials=20, seed=1)
        >>> search.suggest(3) == search.suggest(3)
        True
    """

    space: Mapping[str, Any]
    metric: str = "validation/loss"
    mode: Mode = "min"
    objectives: Mapping[str, Mode] = field(default_factory=dict)
    constraints: Sequence[str] = ()
    trials: int | None = None
    concurrent: int | None = None
    algorithm: Any = "random"
    scheduler: Any = None
    seed: int = 0
    points: Sequence[Mapping[str, Any]] = ()
    keep_best_trials: int | None = None
    max_checkpoint_bytes: float | None = None
    warm_start: Sequence[str] = ()
    time_budget: Duration | None = None
    patience: int | None = None
    target: float | None = None
    stop: Any = None
    callbacks: Sequence[Any] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.space, Mapping) or not self.space:
            raise ConfigError(f"space must be a non-empty dict of axes by path, got {self.space!r}")
        object.__setattr__(self, "space", {path: as_axis(value) for path, value in self.space.items()})
        self._check_list("points", "dicts of values by path", '{"config.learning_rate": 1e-3}')
        object.__setattr__(self, "points", tuple(map(python_values, self.points)))
        if self.mode not in get_args(Mode):
            raise ConfigError(f"mode must be one of {', '.join(get_args(Mode))}, got {self.mode!r}")
        self._check_created()
        self._check_algorithm()
        check_positive_ints(self, "trials", "concurrent", "keep_best_trials", "patience")
        if self.time_budget is not None:
            object.__setattr__(self, "time_budget", Duration.parse(self.time_budget))
            if self.time_budget.unit != "seconds":
                raise ConfigError(f'time_budget must be a time such as "2h", got {self.time_budget}')
        most = self.max_checkpoint_bytes
        if most is not None and not (is_number(most) and most > 0):
            raise ConfigError(f"max_checkpoint_bytes must be a number > 0, such as 20e9, got {most!r}")
        self._check_list("warm_start", "folders of sweeps", '"runs/earlier-sweep"')
        if self.warm_start and self.algorithm in ("random", "grid"):
            raise ConfigError(f"warm_start needs an algorithm that learns, such as 'tpe', got {self.algorithm!r}")
        if self.target is not None and not is_number(self.target):
            raise ConfigError(f"target must be a finite number, got {self.target!r}")
        if not isinstance(self.metric, str):
            raise ConfigError(f"metric must be one name, got {self.metric!r}: name the others in objectives")
        if not self.metric.startswith(("validation/", "train/")):
            raise ConfigError(f"metric must start with 'validation/' or 'train/', got {self.metric!r}")
        self._check_stop()
        if not isinstance(self.callbacks, Sequence) or not all(
            is_from(each, "ray.tune.callback") for each in self.callbacks
        ):
            raise ConfigError(f"callbacks must be a list of objects of tune.Callback, got {self.callbacks!r}")
        self._check_objectives()
        self._check_scheduler()
        check_space(self.space, self.algorithm)
        if not any(isinstance(axis, Axis | When) for axis in self.space.values()) and self.num_trials > 1:
            raise ConfigError(
                f"nothing in the space varies, so all {self.num_trials} trials would be equal: add an axis such as "
                "LogUniform or Choice, or set trials=1"
            )
        if isinstance(self.scheduler, PBT):
            check_varied(self.space, self.scheduler, self.varied)
        for number, point in enumerate(self.points):
            check_point(self.space, f"points[{number}]", point)

    @property
    def num_trials(self) -> int:
        """Number of trials."""
        every = len(self.points) + len(self._grid)
        if self.algorithm == "grid":
            return min(every, self.trials or every)
        has_grid = any(isinstance(axis, Grid) for axis in self.space.values())
        return self.trials or (every if has_grid else 10)

    @property
    def all_objectives(self) -> dict[str, Mode]:
        """The metric and the further objectives, with their modes."""
        return {self.metric: self.mode, **self.objectives}

    @property
    def pauses(self) -> bool:
        """Whether the scheduler may pause or change trials, and therefore needs a checkpoint of each evaluation."""
        if not is_tune_scheduler(self.scheduler):
            return isinstance(self.scheduler, PBT)
        names = [each.__name__ for each in type(self.scheduler).__mro__]
        return names[0] != "FIFOScheduler" and "AsyncHyperBandScheduler" not in names

    @property
    def is_population_based(self) -> bool:
        """Whether trials exchange weights, and should therefore all train concurrently."""
        names = [each.__name__ for each in type(self.scheduler).__mro__]
        return isinstance(self.scheduler, PBT) or "PopulationBasedTraining" in names

    @property
    def has_searcher(self) -> bool:
        """Whether the algorithm is a `Searcher` of Ray Tune."""
        return is_from(self.algorithm, "ray.tune.search.searcher")

    @property
    def varied(self) -> dict[str, Axis]:
        """The axes that `PBT` changes while trials train; empty for other schedulers."""
        if not isinstance(self.scheduler, PBT):
            return {}
        return {path: self.space[path] for path in self.scheduler.vary if path in self.space} or {
            path: axis for path, axis in self.space.items() if isinstance(axis, (Uniform, LogUniform))
        }

    def suggest(self, index: int, tried: Sequence[PastTrial] = ()) -> Params:
        """Return the values of a trial: a function of the seed, the index and, if it learns, the earlier trials.

        Random values if the algorithm is a `Searcher`, which only `sweep` asks.

        Args:
            index: index of the trial, from 0.
            tried: the earlier trials in their current state.

        Raises:
            ConfigError: Optuna is needed but not installed, or the algorithm suggests no dict of values by path.
        """
        point = self.points[index] if index < len(self.points) else {}
        if self.algorithm == "tpe":
            return self._tpe.suggest(index, tried, point)
        if point or self.algorithm == "random" or self.has_searcher:
            return self.sample(index, point)
        if self.algorithm == "grid":
            return dict(self._grid[index - len(self.points)])
        values = self.algorithm.suggest(index, tried)
        if not isinstance(values, Mapping) or not all(isinstance(path, str) for path in values):
            raise ConfigError(
                f"{_class_of(self.algorithm)}.suggest must return a dict of values by path, got {values!r}"
            )
        return {**self.fixed, **python_values(dict(values))}

    @property
    def fixed(self) -> Params:
        """The values that all trials have."""
        return {path: value for path, value in self.space.items() if not isinstance(value, Axis | When)}

    def sample(self, index: int, point: Mapping[str, Any] | None = None) -> Params:
        """Return random values for a trial; those of the point are kept."""

        def draw(path: str, axis: Any) -> Any:
            if isinstance(axis, Grid):
                return self._grid[index % len(self._grid)][path]
            # One generator per field, so that adding a field does not change the values of the others.
            return axis.draw(random.Random(f"{self.seed} {index} {path}"))

        return sample(self.space, draw, point or {})

    def grid(self) -> list[Params]:
        """Return all combinations of choices, or of the axes that are `Grid`; the last field changes fastest."""
        return list(self._grid)

    @cached_property
    def _grid(self) -> list[Params]:
        # Cached: a million combinations take a second to make, and each trial needs them.
        if self.algorithm == "grid":
            return combinations(self.space)
        return combinations({path: axis for path, axis in self.space.items() if isinstance(axis, Grid)})

    @cached_property
    def _tpe(self) -> TPE:
        return TPE(self.space, objectives=self.all_objectives, seed=self.seed, constraints=self.constraints)

    def to_plain(self) -> Params:
        """Return the search for a record: axes and schedulers by class with what differs from their defaults."""
        algorithm = self.algorithm if isinstance(self.algorithm, str) else _class_of(self.algorithm)
        return {**{each.name: _plain(getattr(self, each.name)) for each in fields(self)}, "algorithm": algorithm}

    @classmethod
    def plain_defaults(cls) -> Params:
        """Return the default values, for fields that a record of an earlier version lacks."""
        plain = {each.name: _plain(each.default) for each in fields(cls) if each.default is not MISSING}
        return {**plain, "objectives": {}}

    def check(self, experiment: Experiment) -> None:
        """Check that the search fits an experiment.

        Raises:
            ConfigError: it does not; names the path, the value, and the nearest valid name.
        """
        if self.algorithm == "tpe":
            optuna = optuna_search.required()
            if self.constraints and int(optuna.__version__.partition(".")[0]) < 5:
                raise ConfigError(f"constraints with algorithm='tpe' need Optuna 5, got {optuna.__version__}")
        for path, axis in self.space.items():
            if path.split(".")[0] in ("name", "trainer", "storage"):
                raise ConfigError(
                    f"{path} cannot be searched: it is set by the sweep; use paths below config, retries or scaling"
                )
            for value in samples_of(axis):
                self._check_value(experiment, path, value)
        for number, point in enumerate(self.points):
            try:
                override(experiment, self.sample(number, point))
            except ConfigError as error:
                raise ConfigError(f"points[{number}]: {error}") from error
        scaling = self.largest_scaling(experiment)
        if not scaling.trains_in_trial and self.metric.startswith("train/"):
            raise ConfigError(
                "train/* metrics require single-worker trials (scaling.workers=1) without scaling.env and runtime_env, "
                f"got {scaling}: workers that Ray Train starts for a trial report evaluations only"
            )
        if experiment.scaling.evaluation_worker is not None:
            raise ConfigError(
                "scaling.evaluation_worker is not supported in sweeps, whose trials are judged by evaluations of their "
                "own: leave it out"
            )
        if self.metric.startswith("train/") and self.pauses:
            raise ConfigError(
                f"{type(self.scheduler).__name__} decides by evaluations: metric must be a validation/* metric"
            )

    def largest_scaling(self, experiment: Experiment) -> Scaling:
        """Return the resources of the largest trial: the space may have paths below `scaling`."""
        found = {path: axis for path, axis in self.space.items() if path.split(".")[0] == "scaling"}
        scalings: list[Scaling] = []
        for values in itertools.product(*map(samples_of, found.values())):
            with suppress(ConfigError):
                scalings.append(override(experiment, dict(zip(found, values, strict=True))).scaling)
        size = ("GPU", "CPU")
        return max(
            scalings or [experiment.scaling],
            key=lambda each: [each.reserved_by(each.max_workers).get(name, 0) for name in size],
        )

    def _check_value(self, experiment: Experiment, path: str, value: Any) -> None:
        """Check that a value is valid in at least one trial."""
        wrong: ConfigError | None = None
        for required in conditions(self.space, path):
            # By itself, else with values of other axes: a width may be valid only for some numbers of heads.
            for others in ({}, *map(self.sample, range(_MOST_SAMPLES))):
                try:
                    override(experiment, {**others, **required, path: value})
                except ConfigError as error:
                    wrong = wrong or error
                else:
                    return
        raise ConfigError(f"space: {wrong}") from wrong

    def trial(self, experiment: Experiment, name: str, values: Params) -> Experiment:
        """Return the experiment of one trial. Its run is in the folder of the sweep."""
        settings = self.settings(experiment, values)
        changed: Experiment = override(experiment, settings)
        return replace(changed, name=name, storage=experiment.run_dir)

    def settings(self, experiment: Experiment, values: Params) -> Params:
        """Return the values of a trial with the settings that the sweep needs."""
        if not self.metric.startswith("validation/"):
            return dict(values)
        settings: Params = {"config.checkpoint.monitor": self.metric, "config.checkpoint.mode": self.mode}
        if self.pauses:
            keep = experiment.config.checkpoint.keep_last
            settings["config.checkpoint.background"] = False
            settings["config.checkpoint.keep_last"] = keep if keep == "all" else max(keep, 4)
        return {**settings, **values}

    def _check_created(self) -> None:
        """Refuse a class in place of an object: a call of it would be taken for the decision of a function."""
        callbacks = self.callbacks if isinstance(self.callbacks, (list, tuple)) else ()
        for name in ("algorithm", "scheduler", "stop"):
            check_created(name, getattr(self, name))
        for number, each in enumerate(callbacks):
            check_created(f"callbacks[{number}]", each)

    def _check_algorithm(self) -> None:
        algorithm = self.algorithm
        if self.has_searcher:
            if any(isinstance(axis, When) for axis in self.space.values()):
                raise ConfigError(
                    f"When cannot be used with {_class_of(algorithm)}, which searches all axes in every trial: use "
                    "algorithm='random' or 'tpe'"
                )
            if is_from(algorithm, "ray.tune.search.repeater"):
                raise ConfigError(
                    "algorithm=Repeater(...) would repeat trials of a sweep with the same seed: use it in a Tuner of "
                    "trainable(experiment), which gives each repetition another seed"
                )
            return
        if is_from(algorithm, "ray.tune.search.search_algorithm"):
            raise ConfigError(
                f"algorithm must be a Searcher, got a {_class_of(algorithm)}: use algorithm='grid', or 'random' with "
                "Grid(...) for some axes"
            )
        suggests = callable(getattr(algorithm, "suggest", None))
        if not suggests and algorithm not in _ALGORITHMS:
            raise ConfigError(
                f"algorithm must be one of {', '.join(_ALGORITHMS)}, a Searcher of Ray Tune, or an object with "
                f"suggest(index, tried), got {algorithm!r}"
            )

    def _check_list(self, name: str, kind: str, example: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ConfigError(f"{name} must be a list of {kind}, such as [{example}], got {value!r}")
        object.__setattr__(self, name, tuple(value))

    def _check_objectives(self) -> None:
        self._check_list("constraints", "limits", '"validation/latency <= 20"')
        for text in self.constraints:
            Constraint.parse(text)
        if not isinstance(self.objectives, Mapping):
            raise ConfigError(
                f'objectives must be a dict of "min" or "max" by metric, such as {{"validation/parameters": "min"}}, '
                f"got {self.objectives!r}"
            )
        for name, mode in self.objectives.items():
            if name == self.metric or mode not in get_args(Mode):
                raise ConfigError(
                    f"objectives must be metrics besides {self.metric}, each 'min' or 'max', got {name!r}: {mode!r}"
                )
        if not (self.objectives or self.constraints):
            return
        kind = "objectives" if self.objectives else "constraints"
        for field_name in ("keep_best_trials", "max_checkpoint_bytes", "patience", "target"):
            if getattr(self, field_name) is not None:
                raise ConfigError(f"{field_name} cannot be used with {kind}: it judges trials by {self.metric} alone")
        if self.objectives and self.scheduler is not None:
            raise ConfigError(
                f"{_class_of(self.scheduler)} cannot be used with objectives: it judges by {self.metric} alone"
            )
        if self.has_searcher:
            raise ConfigError(
                f"{_class_of(self.algorithm)} cannot be used with {kind}: use algorithm='tpe' or 'random', or an "
                "object with suggest(index, tried)"
            )

    def _check_scheduler(self) -> None:
        scheduler = self.scheduler
        if (
            scheduler is not None
            and not isinstance(scheduler, get_args(Scheduler))
            and not is_tune_scheduler(scheduler)
        ):
            kinds = ", ".join(each.__name__ for each in get_args(Scheduler))
            raise ConfigError(f"scheduler must be one of {kinds}, or a TrialScheduler of Ray Tune, got {scheduler!r}")
        if is_tune_scheduler(scheduler):
            self._check_tune_scheduler(scheduler)
        for name in ("keep_best_trials", "max_checkpoint_bytes"):
            if getattr(self, name) is not None and self.is_population_based:
                raise ConfigError(
                    f"{name} cannot be used with PBT: it could delete a checkpoint that a trial resumes from"
                )
        if self.algorithm not in ("random", "grid") and self.is_population_based:
            name = f"{self.algorithm!r}" if isinstance(self.algorithm, str) else _class_of(self.algorithm)
            raise ConfigError(
                f"algorithm={name} cannot be used with PBT, which changes the values of trials while they train"
            )

    def _check_tune_scheduler(self, scheduler: Any) -> None:
        """Check a scheduler of Ray Tune, whose settings have no public attributes."""
        name = _class_of(scheduler)
        if is_from(scheduler, "ray.tune.schedulers.resource_changing_scheduler"):
            raise ConfigError(
                f"scheduler={name}(...) would change the resources of trials, which a sweep keeps: use "
                "it in a Tuner of trainable(experiment)"
            )
        if any(each.__name__ == "PopulationBasedTrainingReplay" for each in type(scheduler).__mro__):
            raise ConfigError(
                f"scheduler={name}(...) would replace the values that the search gives to a trial: use it in a Tuner "
                "of trainable(experiment)"
            )
        judged = scheduler.metric, tune_setting(scheduler, "mode", self.mode)
        accepts = copy.deepcopy(scheduler).set_search_properties(self.metric, self.mode)
        if not accepts and judged != (self.metric, self.mode):
            raise ConfigError(
                f"scheduler={name}(...) has metric={judged[0]!r} and mode={judged[1]!r}, but the search has "
                f"{self.metric!r} and {self.mode!r}: create it without metric and mode: the search sets them"
            )
        time = tune_setting(scheduler, "time_attr", None)
        if time is not None and time not in _REPORTED:
            raise ConfigError(f"scheduler={name}(...): time_attr must be one of {', '.join(_REPORTED)}, got {time!r}")
        changed = tune_setting(scheduler, "hyperparam_mutations", ())
        if unknown := [path for path in changed if path not in self.space]:
            raise ConfigError(
                f"scheduler={name}(...) changes {', '.join(unknown)}, which is not in the space: add an axis for it"
            )

    def _check_stop(self) -> None:
        if not (self.stop is None or isinstance(self.stop, Mapping) or callable(self.stop)):
            raise ConfigError(
                f'stop must be a dict such as {{"evaluations": 20}}, a function or a Stopper of Ray Tune, '
                f"got {self.stop!r}"
            )
        reported = (self.metric, *_REPORTED)
        if isinstance(self.stop, Mapping) and (unknown := [key for key in self.stop if key not in reported]):
            raise ConfigError(f"stop: a report has {', '.join(reported)}, but no {', '.join(map(repr, unknown))}")


def _class_of(value: Any) -> str:
    return type(value).__qualname__


def _plain(value: Any) -> Any:
    """Return a part of a search as plain values; an object that is not Headway's becomes the name of its class."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if type(value).__module__.startswith("headway.orchestrator.sweeps.") and is_dataclass(value):
        settings = {
            each.name: getattr(value, each.name) for each in fields(value) if getattr(value, each.name) != each.default
        }
        return {_class_of(value): {name: _plain(each) for name, each in settings.items()}}
    if callable(value) or type(value).__module__.startswith("ray."):
        return getattr(value, "__qualname__", _class_of(value))
    try:
        return to_plain(value)
    except ConfigError:
        return _class_of(value)


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
    try:
        found = load_named(target, name)
    except ConfigError as error:
        raise ConfigError(
            f"{error}. A sweep needs a Search: add search = Search(...), or name it by --search"
        ) from error
    if not isinstance(found, Search):
        raise ConfigError(f"{name} in {target} must be a Search, got a {type(found).__name__}")
    values = parse_overrides(of_search)
    # The keys of the space contain dots: set one in all trials, and leave the others unchanged.
    fixed = {path.removeprefix("space."): values.pop(path) for path in list(values) if path.startswith("space.")}
    return experiment, override(found, {**values, **({"space": {**found.space, **fixed}} if fixed else {})}, "search")
