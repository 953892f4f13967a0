"""Console output of a sweep: a line per ended trial, and on a terminal a table of the running ones below."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from headway.trainer.checkpoints.retention import Mode
from headway.trainer.loop import messages

from ..config.experiment import Experiment
from ..display.tables import format_table
from .record import TrialResult, ranked
from .result import SweepResult, labels
from .search import Search

_MOST_ROWS = 12


@dataclass
class _Row:
    """A running trial."""

    trial: TrialResult
    step: int = 0
    value: float | None = None


class SweepConsole:
    """Shows a sweep while it runs. Any thread may call it.

    Args:
        metric, mode: the metric of the search, and whether its best is the "min" or the "max".
        console: output; a terminal gets a table of the running trials.
    """

    def __init__(self, metric: str, mode: Mode, console: Console | None = None) -> None:
        self._metric, self._mode = metric, mode
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._rows: dict[str, _Row] = {}
        self._best: TrialResult | None = None
        self._total = self._done = 0
        self._constraints: Sequence[str] = ()

    def line(self, text: str, style: str | None = None) -> None:
        """Print one line, and log it as a message of the sweep: as a warning if it is yellow."""
        messages.log(
            text,
            lambda line: self._console.print(Text(line, style=style or ""), soft_wrap=True),
            level=logging.WARNING if style == "yellow" else logging.INFO,
        )

    def begin(self, experiment: Experiment, search: Search, resources: str, *, done: int, resuming: int) -> None:
        """Print the plan of the sweep, and start the table."""
        self._total, self._done, self._constraints = search.num_trials, done, search.constraints
        before = f" ({done} done, {resuming} to resume)" if done or resuming else ""
        self.line(f"{experiment.name}: {self._total} trials{before}; its files: {experiment.run_dir}")
        self.line(resources, "dim")
        if self._console.is_terminal:
            self._live = Live(self._table(), console=self._console, refresh_per_second=4, transient=True)
            self._live.start()

    def started(self, trial: TrialResult) -> None:
        """Add a trial that starts to train."""
        with self._lock:
            self._rows[trial.name] = _Row(trial)

    def reported(self, name: str, report: Mapping[str, Any]) -> None:
        """Update the step and metric of a trial."""
        with self._lock:
            if (row := self._rows.get(name)) is not None and self._metric in report:
                # For the scheduler, the worst value replaces one that is not finite.
                value = float(report[self._metric]) if report.get("is_finite", True) else math.nan
                row.step, row.value = int(report.get("step", 0)), value

    def ended(self, trial: TrialResult, *, before: bool = False) -> None:
        """Print how a trial ended; one from before this start is only compared with the best."""
        with self._lock:
            self._rows.pop(trial.name, None)
            candidates = [trial] if self._best is None else [self._best, trial]
            self._best = next(iter(ranked(candidates, self._mode, self._constraints)), None)
            if before:
                return
            self._done += 1
        value = "" if trial.metric is None else f"  {self._metric} {trial.metric:.4g}"
        ended = f"{trial.name} {trial.status} after {trial.steps:,} steps{value}  {shown(trial.values)}"
        self.line(ended + (f"  {trial.error}" if trial.error else ""), "yellow" if trial.error else None)

    def left(self, trial: TrialResult) -> None:
        """Remove a stopped trial that can resume."""
        with self._lock:
            self._rows.pop(trial.name, None)

    def refresh(self) -> None:
        """Redraw the table, on a terminal."""
        if self._live is not None:
            self._live.update(self._table())

    def end(self, result: SweepResult) -> None:
        """Print the result of the sweep."""
        ended = sum(each.has_ended for each in result.trials)
        failed = f", {len(result.failed)} failed" if result.failed else ""
        self.line(f"{result.status}: {ended} trials{failed} ({result.reason})", "bold")
        if (best := result.best) is not None:
            self.line(f"best: {best.name}  {result.metric} {best.metric:.4g}  {shown(best.values)}")
            self.line(f"its checkpoint: {best.checkpoint}")
        elif result.constraints and result.trials:
            self.line(f"no trial meets the constraints: {', '.join(result.constraints)}", "yellow")
        if result.objectives:
            self.line(f"not dominated: {', '.join(each.name for each in result.pareto)}")
        self.line(f"its files: {result.sweep_dir}")
        if result.status in ("interrupted", "stopped", "time_limit"):
            self.line("to resume, start it again")
        if result.failed:
            self.line("to retry the failed trials, fix the cause and start it again with --retry-failed")

    def close(self) -> None:
        """Remove the table; lines stay."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _table(self) -> Text:
        with self._lock:
            rows = list(self._rows.values())
            best, done = self._best, self._done
        table = [("TRIAL", "STEP", self._metric, "VALUES")]
        for row in rows[:_MOST_ROWS]:
            value = "" if row.value is None else f"{row.value:.4g}"
            table.append((row.trial.name, f"{row.step:,}", value, shown(row.trial.values)))
        if len(rows) > _MOST_ROWS:
            table.append((f"and {len(rows) - _MOST_ROWS} more", "", "", ""))
        if best is not None:
            table.append((f"best: {best.name}", f"{best.steps:,}", f"{best.metric:.4g}", shown(best.values)))
        text = f"{format_table(table, right=('STEP', self._metric))}\n{done} of {self._total} done"
        return Text(text, no_wrap=True, overflow="ellipsis")


def shown(values: Mapping[str, Any]) -> str:
    """Return hyperparameters as text, under their shortest unambiguous names."""
    named = labels(values)
    return "  ".join(
        f"{named[path]} {value:.4g}" if isinstance(value, float) else f"{named[path]} {value}"
        for path, value in values.items()
    )
