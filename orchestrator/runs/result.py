"""What came of a run, over all its attempts, for whoever called `fit`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from headway.trainer.data.protocols import Guarantee
from headway.trainer.result import Status, Table, read_history

from .goodput import goodput_report_of
from .run import Run


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended, as far as it has come over all its attempts.

    Attributes:
        status: "completed", "stopped", "time_limit" or "interrupted". A failure is raised.
        reason: why, in words.
        metrics: the last value of every metric.
        history: one dict per completed epoch; `history.columns()` are lists by metric.
        steps, epochs, samples, tokens: how far it is; tokens where the trainer counts them.
        attempts: lives of worker groups so far.
        preemptions, failures: how many of them ended because machines were taken away, and how many by a failure.
        run_dir: where its files lie.
        last_checkpoint, best_checkpoint: paths in it.
        best_metric, best_step: the best value of the metric by which checkpoints are chosen, and when it was measured.
        resumed_from: the checkpoint that the last attempt began from.
        data_guarantee: what of its place in the training data a resumed run finds again: "exact", "epoch" or "none".
        signal: the number of the signal that interrupted it, if one did.
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
        """The share of its time, over all attempts, that went into updates that counted, from 0 to 1.

        As `headway runs show` has it: docs/measuring.md says where the rest can go. Reads the files of the run.
        """
        return goodput_report_of(Run(self.run_dir)).goodput

    @classmethod
    def recorded(cls, run: Run, *, status: Status, reason: str, signal: int | None = None) -> RunResult:
        """Returns what the files of a run say of it, where no worker has just said how far it is."""
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
