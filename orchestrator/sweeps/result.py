"""What came of a sweep, as its files say: for whoever called `sweep`, and for anybody later, without Ray."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from headway.trainer.checkpoints.retention import Mode
from headway.trainer.config import TrainerConfig
from headway.trainer.result import Table, read_history

from ..runs.run import Run
from ..storage.folder import absolute
from .record import Sweep, Trial


@dataclass(frozen=True)
class TrialResult:
    """How one trial of a sweep ended, or stands.

    Attributes:
        trial: its name, what it tried, how it ended, its error, its checkpoints.
    """

    trial: Trial

    @property
    def name(self) -> str:
        """Of the trial."""
        return self.trial.name

    @property
    def values(self) -> dict[str, Any]:
        """What it tried, by dotted path."""
        return self.trial.values

    @property
    def status(self) -> str:
        """How its run ended, or "pending" or "running"."""
        return self.trial.status

    @property
    def error(self) -> str | None:
        """What failed, in one line."""
        return self.trial.error

    @property
    def metric(self) -> float | None:
        """The best value of the sweep's metric; None if none was finite."""
        return self.trial.metric

    @property
    def checkpoint(self) -> str | None:
        """Path of its best checkpoint, or of the last one where none is the best."""
        return self.trial.best_checkpoint or self.trial.last_checkpoint

    @property
    def run_dir(self) -> str:
        """Where its run lies."""
        return self.trial.run_dir

    @property
    def config(self) -> TrainerConfig:
        """Its whole config."""
        return Run(self.run_dir).experiment().config

    @property
    def history(self) -> Table:
        """One dict per completed epoch."""
        return read_history(f"{self.run_dir}/metrics.jsonl")


@dataclass(frozen=True)
class SweepResult:
    """How a sweep ended, or stands.

    Attributes:
        sweep_dir: where its files lie.
        status: "running", "completed", "stopped" or "interrupted".
        reason: why, in words.
        trials: in the order of their suggestions.
        metric, mode: what was looked for.
        signal: the number of the signal that interrupted it, if one did.
    """

    sweep_dir: str
    status: str
    reason: str
    trials: list[TrialResult]
    metric: str
    mode: Mode
    signal: int | None = None

    @classmethod
    def read(cls, sweep_dir: str, *, signal: int | None = None) -> SweepResult:
        """Return the result of a sweep from its folder.

        Args:
            sweep_dir: a path or a URI.
            signal: that interrupted it.

        Raises:
            ConfigError: there is no sweep.
        """
        sweep = Sweep(absolute(sweep_dir))
        search = sweep.record.search
        return cls(
            sweep_dir=sweep.sweep_dir,
            status=sweep.status,
            reason=sweep.record.reason,
            trials=[TrialResult(trial) for trial in sweep.trials()],
            metric=search["metric"],
            mode=search["mode"],
            signal=signal,
        )

    @property
    def best(self) -> TrialResult | None:
        """The trial with the best value of the metric, of equal ones the first; None if none has a finite one."""
        return next(iter(self.ranked()), None)

    @property
    def failed(self) -> list[TrialResult]:
        """The trials that failed, each with its error."""
        return [each for each in self.trials if each.status == "failed"]

    @property
    def table(self) -> Table:
        """One row per trial: its name, status, metric and steps, what it tried, and its error if it has one."""
        return Table(
            {
                "trial": each.name,
                "status": each.status,
                self.metric: math.nan if each.metric is None else each.metric,
                "steps": each.trial.steps,
                **each.values,
                **({"error": each.error} if each.error else {}),
            }
            for each in self.trials
        )

    def dataframe(self) -> Any:
        """Return the table as a `pandas.DataFrame`.

        Raises:
            ImportError: pandas is not installed.
        """
        return self.table.dataframe()

    def ranked(self) -> list[TrialResult]:
        """Return the trials that have a finite value of the metric and did not fail, the best first."""
        judged = [each for each in self.trials if each.metric is not None and each.status != "failed"]
        return sorted(judged, key=lambda each: (each.metric or 0.0) * (1 if self.mode == "min" else -1))


def labels(paths: Iterable[str]) -> dict[str, str]:
    """Return for each dotted path the shortest end of it that is no other's, for people."""
    parts = {path: path.split(".") for path in paths}
    ends = Counter(".".join(each[-size:]) for each in parts.values() for size in range(1, len(each) + 1))
    found = {}
    for path, each in parts.items():
        tails = (".".join(each[-size:]) for size in range(1, len(each) + 1))
        found[path] = next((tail for tail in tails if ends[tail] == 1), path)
    return found
