"""Console output of a run: lines, and on a terminal a progress bar below them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn
from rich.table import Column
from rich.text import Text

from headway.trainer.callbacks.progress_bar import Pace, progress_line
from headway.trainer.loop import messages
from headway.trainer.redaction import redact

from ..storage.events import Event

_BAR_WIDTH = 16
# Includes the spaces between the columns.
_PERCENT_WIDTH = 6


class RunConsole:
    """Shows a run while it trains.

    Args:
        console: output; a terminal gets a bar, anything else one line per record.

    Attributes:
        is_resumed: whether the run existed before this start.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._total: int | None = None
        self.is_resumed = False
        self._attempt = 0
        self._is_from_scratch = self._has_restored = False
        self._has_shown_step = self._has_trained = False
        # Attempt and step.
        self._last_record = (-1, -1)
        self._pace = Pace()

    def line(self, text: str, style: str | None = None) -> None:
        """Print one line, and log it as a message of the run: as a warning if it is yellow."""
        level = logging.WARNING if style == "yellow" else logging.INFO
        messages.log(redact(text), lambda line: self._print(line, style), level=level)

    def _print(self, text: str, style: str | None = None) -> None:
        # A style passed to `print` would also colour the bar.
        self._console.print(Text(text, style=style or ""), soft_wrap=True)

    def record(self, record: Mapping[str, Any]) -> None:
        """Show a metrics record: on a terminal in the bar, elsewhere as a line."""
        if "elapsed_s" not in record:
            return
        # A restart rewrites the file, and earlier records come again.
        place = record.get("attempt", 0), record["step"]
        if place <= self._last_record:
            return
        self._last_record = place
        training = {name: value for name, value in record.items() if not name.startswith("validation/")}
        text = progress_line(training, total_steps=self._total, left_s=self._pace.left_s(record, self._total))
        if not self._console.is_terminal:
            self._print(text)
            return
        self._has_trained = True
        self._update_bar(
            _shorten(text, self._console.width - _BAR_WIDTH - _PERCENT_WIDTH),
            step=int(record["step"]),
            total=self._total,
        )

    def starting(self, text: str) -> None:
        """Show a pulsing bar on a terminal, while the run is not training yet."""
        if self._console.is_terminal:
            self._update_bar(text)

    def event(self, event: Event) -> None:
        """Show an event of the run."""
        match event["event"]:
            case "driver_started":
                self._is_from_scratch = event.get("resume") == "never"
            case "attempt_started":
                self._attempt = event["attempt"]
                self._has_shown_step = self._has_restored = False
                hosts = {worker["host"] for worker in event["workers"]}
                size = event["world_size"]
                self.line(
                    f"attempt {self._attempt}: {size} worker{'s'[: size > 1]} on {', '.join(sorted(hosts))}", "dim"
                )
                self.starting("setting up")
            case "resized":
                now, before = event["to"], event["from"]
                resuming = f", resuming from step {event['step']:,}" if event["step"] else ""
                self.line(f"{now} worker{'s'[: now > 1]} now ({before} before){resuming}")
                self._has_shown_step = True
            case "restored":
                if not self._has_shown_step:
                    self.line(f"resuming from step {event['step']:,} (attempt {self._attempt})")
                self._has_shown_step, self._has_restored = False, True
            case "training":
                self._total = event.get("total_steps")
                is_restart = (self._attempt > 1 or self.is_resumed) and not self._is_from_scratch
                if is_restart and event["step"] == 0 and not self._has_restored:
                    self.line("no checkpoint yet: starting at step 0")
                self.starting("first steps")
            case "evaluated":
                self.line(f"step {event['step']:,} · {_numbers(event['metrics'])}", "bold")
            case "evaluation_failed":
                what = (
                    "the evaluation worker failed" if event["step"] is None else f"step {event['step']:,} not evaluated"
                )
                self.line(f"{what}: {event['error']}", "yellow")
            case "checkpoint_saved":
                self.line(f"step {event['step']:,} · checkpoint {event['path']}", "dim")
            case "message":
                self.line(event["text"])
            case "warning":
                self.line(f"{event['category']}: {event['text']}", "yellow")
            case "group_failed" if event["retrying"]:
                # The last failure is in the error that ends the run.
                self.line(f"{event['text']}; {event.get('next') or 'restarting the workers'}", "yellow")
                if "last_words" in event:
                    self.line(f"  the last output of the process: {event['last_words']}", "dim")
                self.starting("restarting the workers")
            case "rank_late":
                self.line(f"{event['text']}; stacks: {event['stacks']}", "yellow")
            case "stop_requested":
                self.line(f"stopping at step {event['step']:,}: {event['reason']}")

    def _update_bar(self, text: str, *, step: int | None = None, total: int | None = None) -> None:
        if self._bar is None:
            self._bar = Progress(
                BarColumn(_BAR_WIDTH, table_column=Column(min_width=_BAR_WIDTH)),
                TaskProgressColumn(),
                TextColumn("{task.description}"),
                console=self._console,
            )
            self._task = self._bar.add_task(text, total=total)
            self._bar.start()
        assert self._task is not None
        self._bar.update(self._task, description=text, completed=step, total=total, refresh=True)

    def close(self) -> None:
        """Remove the bar; lines stay."""
        if self._bar is not None and self._task is not None:
            # Keep the last numbers on the screen, but not a bar of a run that has not trained.
            self._bar.update(self._task, visible=self._has_trained)
            self._bar.stop()
            self._bar = None


def _shorten(line: str, width: int) -> str:
    """Leave out the least important parts of a progress line that does not fit."""
    for least in ("data ", "epoch "):
        if len(line) > width:
            line = " · ".join(part for part in line.split(" · ") if not part.startswith(least))
    return line


def _numbers(metrics: Mapping[str, Any]) -> str:
    return " · ".join(f"{name} {float(value):.4g}" for name, value in metrics.items())
