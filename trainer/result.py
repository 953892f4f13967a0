"""What came of a training: its history while it runs, and the truth about how it ended."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from .data.protocols import Guarantee

Status = Literal["completed", "stopped", "time_limit", "interrupted", "failed"]


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """How a call of `fit` ended. An error of the user's step is raised instead; "failed" is what a run's record says.

    Attributes:
        status: "completed" when a limit was reached, "stopped" when somebody asked for it, "time_limit",
            "interrupted" by a signal.
        reason: why, in words.
        metrics: the last value of every metric, by its name in the log.
        history: one dict per completed epoch, over all attempts: "epoch" (from 1), "step", the means of the training
            metrics over the epoch, the last evaluation in it, and "dropped_samples" where some filled no global batch.
            `history.columns()` are lists by metric, one value per epoch.
        steps: optimizer updates, over all attempts.
        epochs: completed passes over the data.
        samples: samples learned from, over all ranks and attempts.
        tokens: tokens of these, where `Trainer.num_tokens` counts them, else 0.
        last_checkpoint: path of the newest checkpoint, from which a resumed run goes on.
        best_checkpoint: path of the one with the best value of `CheckpointConfig.monitor` among those that are kept and
            were evaluated as they are; it need not be that of `best_step`, unless `save_best` is set.
        best_metric: the best value of that metric in any evaluation of the run, saved or not; None if none was finite.
        best_step: the update after which it was measured.
        resumed_from: path of the checkpoint that this call of `fit` began from.
        data_guarantee: what of its place in the training data a resumed run finds again: "exact", any; "epoch", the
            start of the epoch in progress, so that samples may be seen twice; "none", nothing.
    """

    status: Status
    reason: str
    metrics: dict[str, float]
    history: Table
    steps: int
    epochs: int
    samples: int = 0
    tokens: int = 0
    last_checkpoint: str | None = None
    best_checkpoint: str | None = None
    best_metric: float | None = None
    best_step: int | None = None
    resumed_from: str | None = None
    data_guarantee: Guarantee = "none"


def read_history(path: str | os.PathLike[str]) -> Table:
    """Reads the history of a run from its `metrics.jsonl`: what `FitResult.history` is, also while the run goes on.

    Args:
        path: of the file, or an fsspec URI; no file is an empty history.

    Example:
        >>> read_history("runs/digits/metrics.jsonl") == result.history
        True
    """
    rows = Table()
    # Late: the trackers import much that a list of runs does not need.
    from .trackers.jsonl import read_records

    for record in read_records(path):
        means = {name.removeprefix(PER_EPOCH): value for name, value in record.items() if name.startswith(PER_EPOCH)}
        if means:
            rows.append({"epoch": float(record["epoch"]), "step": float(record["step"]), **means})
    return rows


PER_EPOCH = "per_epoch/"
"""What the names of the means over an epoch begin with in the log."""


class Table(list[dict[str, Any]]):
    """A list of rows, each a dict of numbers by name, in which a row may lack what another one has.

    Example:
        >>> history = Table([{"epoch": 1, "train/loss": 0.5}, {"epoch": 2, "train/loss": 0.25, "validation/loss": 0.3}])
        >>> history[-1]["train/loss"]
        0.25
        >>> history.columns()["validation/loss"]
        [nan, 0.3]
        >>> print(history.text())
        epoch  train/loss  validation/loss
            1         0.5
            2        0.25              0.3
    """

    def columns(self) -> dict[str, list[Any]]:
        """Returns a list for each name, as long as the table, with NaN where a row has no value."""
        names = dict.fromkeys(name for row in self for name in row)
        return {name: [row.get(name, math.nan) for row in self] for name in names}

    def text(self) -> str:
        """Returns lines for people: a header and the rows, numbers to four digits, empty where there is no value."""
        names = dict.fromkeys(name for row in self for name in row)
        cells = [list(names), *([_cell(row.get(name, "")) for name in names] for row in self)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)
        return "\n".join(line.rstrip() for line in lines)

    def dataframe(self) -> Any:
        """Returns a `pandas.DataFrame`.

        Raises:
            ImportError: pandas is not installed; Headway does not need it.
        """
        import pandas

        return pandas.DataFrame(self.columns())


def _cell(value: Any) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
