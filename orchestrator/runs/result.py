"""`RunResult`: the result of a run over all its attempts, as `fit` returns it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from headway.trainer.data.protocols import Guarantee
from headway.trainer.result import Status, Table, read_history

from .goodput import goodput_report_of
from .run import Run


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended, over all its attempts.

    Attributes:
        status: "completed", "stopped", "time_limit" or "interrupted". A failure is raised instead.
        reason: why it ended, as text.
        metrics: the last value of every metric.
        history: one dict per completed epoch; `history.columns()` gives lists by metric.
        steps, epochs, samples, tokens: progress; tokens are 0 unless the trainer counts them.
        attempts: number of worker groups so far.
        preemptions, failures: number of attempts that ended by preemption, and by a failure.
        run_dir: the run's folder.
        last_checkpoint, best_checkpoint: paths of checkpoints in it.
        best_metric, best_step: best value of the metric that selects checkpoints, and its step.
        resumed_from: the checkpoint from which the last attempt resumed.
        data_guarantee: how exactly a resumed run finds its position in the training data: "exact", "state",
            "epoch" or "none".
        signal: number of the signal that interrupted it, if any.
    """

    status: Status
    reason: str
    run_dir: str
    metrics: dict[str, float] = field(default_factory=dict)
    history: Table = field(default_factory=Table)
    steps: int = 0
    epochs: int = 0
    samples: int = 0
    tokens: int = 0
    attempts: int = 0
    preemptions: int = 0
    failures: int = 0
    last_checkpoint: str | None = None
    best_checkpoint: str | None = None
    best_metric: float | None = None
    best_step: int | None = None
    resumed_from: str | None = None
    data_guarantee: Guarantee = "none"
    signal: int | None = None

    @property
    def goodput(self) -> float:
        """The share of wall time, over all attempts, in updates that counted, from 0 to 1.

        As in `headway runs show`; see docs/measuring.md. Reads the run's files.
        """
        return goodput_report_of(Run(self.run_dir)).goodput

    @classmethod
    def returned(cls, run: Run, fields_of_fit: Mapping[str, Any], *, signal: int | None = None) -> RunResult:
        """Return the result of a run from what `run_attempt` has returned on the main rank."""
        if fields_of_fit.keys() == {"status", "reason"}:  # stopped before training began
            return cls.recorded(run, **fields_of_fit, signal=signal)
        record = run.record
        return cls(
            **fields_of_fit, run_dir=run.run_dir, attempts=record.attempts, preemptions=record.preemptions,
            failures=record.failures, signal=signal,
        )  # fmt: skip

    @classmethod
    def recorded(cls, run: Run, *, status: Status, reason: str, signal: int | None = None) -> RunResult:
        """Return the result of a run from its files, for a run whose workers returned none."""
        record = run.record
        known = {each.name for each in fields(cls)} & {each.name for each in fields(record)} - {"status", "reason"}
        return cls(
            status=status,
            reason=reason,
            run_dir=run.run_dir,
            history=read_history(run.folder.path("metrics.jsonl")),
            signal=signal,
            **{name: getattr(record, name) for name in known},
        )


def describe_end(status: str, steps: int) -> str:
    """Return how a run ended, such as "interrupted after 40 steps".

    Args:
        status: final status of the run.
        steps: updates in its result. If the run was ended immediately, only saved updates count, and there may be none.
    """
    if steps == 0 and status in ("stopped", "time_limit", "interrupted"):
        return f"{status} before an update was saved"
    return f"{status} after {steps:,} steps"
