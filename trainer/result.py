"""Results of training: how `fit` ended, and tables of metrics."""

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
    """How a call of `fit` ended. Errors of the user's steps are raised instead; only records of a run say "failed".

    Attributes:
        status: "completed" at a limit, "stopped" on request, "time_limit", or "interrupted" by a signal.
        reason: description of why the run ended.
        metrics: last value of every metric, by its name in the log.
        history: one dict per completed epoch, over all attempts: "epoch" (from 1), "step", the means of the training
            metrics over the epoch, its last evaluation, and "dropped_samples" if some did not fill a global batch.
            `history.columns()` returns lists by metric, with one value per epoch.
        steps: optimizer updates, over all attempts.
        epochs: completed passes over the data.
        samples: training samples, over all ranks and attempts.
        tokens: tokens of these samples if `Trainer.num_tokens` counts them, otherwise 0.
        last_checkpoint: path of the newest checkpoint, from which a run resumes.
        best_checkpoint: path of the checkpoint with the best value of `CheckpointConfig.monitor`, among those that are
            kept and were evaluated at their step; not necessarily that of `best_step`, unless `save_best` is set.
        best_metric: best value of that metric in any evaluation, saved or not; None if none was finite.
        best_step: update after which `best_metric` was measured.
        resumed_from: path of the checkpoint from which this call of `fit` resumed.
        data_guarantee: where in the training data a run can resume: "exact", anywhere; "state", where the state of the
            data says, on the same number of ranks; "epoch", at the start of the current epoch, so that samples may be
            seen twice; "none", nowhere.
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
    """Read the history of a run, as in `FitResult.history`, from its `metrics.jsonl`, even while the run trains.

    Args:
        path: local path or fsspec URI; a missing file has an empty history.

    Example:
        >>> read_history("runs/digits/metrics.jsonl") == result.history
        True
    """
    rows = Table()
    # Imported here: the trackers import much that a list of runs does not need.
    from .trackers.jsonl import read_records

    for record in read_records(path):
        means = {name.removeprefix(PER_EPOCH): value for name, value in record.items() if name.startswith(PER_EPOCH)}
        if means:
            rows.append({"epoch": float(record["epoch"]), "step": float(record["step"]), **means})
    return rows


PER_EPOCH = "per_epoch/"
"""Prefix of the names of means over an epoch in the log."""


class Table(list[dict[str, Any]]):
    """A list of rows, each a dict of numbers by name; rows may have different names.

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
        """Return a list per name, as long as the table, with NaN where a row has no value."""
        names = dict.fromkeys(name for row in self for name in row)
        return {name: [row.get(name, math.nan) for row in self] for name in names}

    def text(self) -> str:
        """Return the table as text: a header and rows, numbers with four digits, missing values empty."""
        names = dict.fromkeys(name for row in self for name in row)
        cells = [list(names), *([_cell(row.get(name, "")) for name in names] for row in self)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)
        return "\n".join(line.rstrip() for line in lines)

    def dataframe(self) -> Any:
        """Return a `pandas.DataFrame`.

        Raises:
            ImportError: pandas, which Headway does not depend on, is not installed.
        """
        import pandas

        return pandas.DataFrame(self.columns())


def _cell(value: Any) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
