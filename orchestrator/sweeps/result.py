"""The result of a sweep, read from its files, at the end or at any later time. Needs no Ray."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.trainer.checkpoints.retention import Mode
from headway.trainer.result import Table

from ..storage.folder import absolute
from .objectives import constrained, objective_values, pareto
from .record import Sweep, TrialResult, ranked


@dataclass(frozen=True)
class SweepResult:
    """The result of a sweep, or its current state.

    Attributes:
        sweep_dir: its folder.
        status: "running", "completed", "stopped", "interrupted" or "failed".
        reason: why it ended.
        trials: in the order of their suggestions.
        metric, mode: the objective.
        objectives: further objectives, "min" or "max" by metric.
        constraints: limits on metrics.
        signal: number of the signal that interrupted it, if any.
    """

    sweep_dir: str
    status: str
    reason: str
    trials: list[TrialResult]
    metric: str
    mode: Mode
    objectives: Mapping[str, Mode] = field(default_factory=dict)
    constraints: Sequence[str] = ()
    signal: int | None = None

    @classmethod
    def read(cls, sweep_dir: str, *, signal: int | None = None) -> SweepResult:
        """Return the result of a sweep from its folder.

        Args:
            sweep_dir: path or URI.
            signal: number of the signal that interrupted it, if any.

        Raises:
            ConfigError: there is no sweep.
        """
        sweep = Sweep(absolute(sweep_dir))
        search = sweep.record.search
        return cls(
            sweep_dir=sweep.sweep_dir,
            status=sweep.status,
            reason=sweep.record.reason,
            trials=sweep.trials(),
            metric=search["metric"],
            mode=search["mode"],
            objectives=search.get("objectives", {}),
            constraints=search.get("constraints", ()),
            signal=signal,
        )

    @property
    def best(self) -> TrialResult | None:
        """The feasible trial with the best value of the metric, the first of equal ones; None if there is none."""
        return next(iter(self.ranked()), None)

    @property
    def pareto(self) -> list[TrialResult]:
        """The feasible trials that no other one dominates, by the last values of the metric and the further objectives.

        Sorted by the metric. Without further objectives, those with the best last value.
        """
        objectives = {self.metric: self.mode, **self.objectives}
        valued = [(each, objective_values(each.metrics, objectives)) for each in self.ranked()]
        items = [(each, values) for each, values in valued if values is not None]
        found = pareto(items, list(objectives.values()))
        return sorted(found, key=lambda each: each.metrics[self.metric], reverse=self.mode == "max")

    @property
    def failed(self) -> list[TrialResult]:
        """The trials that failed."""
        return [each for each in self.trials if each.status == "failed"]

    @property
    def table(self) -> Table:
        """One row per trial: name, status, metric, steps, hyperparameters, and the error if there is one."""
        return Table(
            {
                "trial": each.name,
                "status": each.status,
                self.metric: math.nan if each.metric is None else each.metric,
                **{name: each.metrics.get(name, math.nan) for name in self._further_metrics},
                "steps": each.steps,
                **each.values,
                **({"error": each.error} if each.error else {}),
            }
            for each in self.trials
        )

    @property
    def _further_metrics(self) -> list[str]:
        """The metrics of the objectives and constraints besides the metric."""
        names = [*self.objectives, *constrained(self.constraints)]
        return [name for name in dict.fromkeys(names) if name != self.metric]

    def dataframe(self) -> Any:
        """Return the table as a `pandas.DataFrame`.

        Raises:
            ImportError: pandas is not installed.
        """
        return self.table.dataframe()

    def to_optuna(self, storage: str | None = None, *, study_name: str | None = None) -> Any:
        """Return the ended trials as a new `optuna.Study`, for example for Optuna's dashboard.

        Args:
            storage: URL of an Optuna storage such as "sqlite:///sweeps.db"; None for memory.
            study_name: name of the study; by default that of the sweep.

        Raises:
            ConfigError: Optuna is not installed, or the storage has a study of this name.
        """
        from .optuna_export import to_study

        record = Sweep(self.sweep_dir).record
        return to_study(
            self.trials,
            record.search["space"],
            {self.metric: self.mode, **self.objectives},
            storage=storage,
            name=study_name or record.name,
        )

    @property
    def importances(self) -> dict[str, float]:
        """How much of the metric's variance each parameter explains (Optuna's fANOVA), the most important first.

        Only from completed trials; empty if there are fewer than four. Parameters that not all trials have are left
        out.

        Raises:
            ConfigError: Optuna is not installed.
        """
        from .optuna_export import importances

        return importances(self.to_optuna())

    def ranked(self) -> list[TrialResult]:
        """Return the trials that have a finite metric, did not fail and meet the constraints, best first."""
        return ranked(self.trials, self.mode, self.constraints)


def labels(paths: Iterable[str]) -> dict[str, str]:
    """Return a label for each dotted path: its shortest unique suffix."""
    parts = {path: path.split(".") for path in paths}
    ends = Counter(".".join(each[-size:]) for each in parts.values() for size in range(1, len(each) + 1))
    found = {}
    for path, each in parts.items():
        tails = (".".join(each[-size:]) for size in range(1, len(each) + 1))
        found[path] = next((tail for tail in tails if ends[tail] == 1), path)
    return found
