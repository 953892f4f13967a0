"""Show progress: a bar on a terminal, one line per record elsewhere."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from ..metrics.units import human_duration as human_duration
from .base import Callback

_ERASE_LINE = "\r\x1b[2K"
_BAR_WIDTH = 16
_REDRAW_S = 0.1


class ProgressBar(Callback):
    """Shows rank 0's records, and on a terminal a bar that advances with every update.

    If the output is not a terminal (a file, a pipe, a cluster's log), it prints one line per record, without control
    characters. The time left is an estimate of training time, without evaluations.

    Args:
        stream: output stream; standard output by default.
        live: whether to draw a bar; by default only if the stream is a terminal.

    Example:
        >>> bar = ProgressBar()
        >>> trainer = Digits(config, callbacks=[bar], printer=bar.print)  # `trainer.print` writes above the bar
    """

    def __init__(self, stream: TextIO | None = None, *, live: bool | None = None) -> None:
        self._stream, self._live = stream, live
        self._pace = Pace()
        self._record: dict[str, Any] = {}
        self._left_s: float | None = None
        self._left_at = 0
        self._drawn = self._interrupted = ""
        self._drawn_s = -math.inf

    def on_step_end(self, trainer: Any) -> None:
        """Advance the bar."""
        now_s = time.monotonic()
        if now_s - self._drawn_s >= _REDRAW_S and self._is_live and trainer.world.is_main:
            self._drawn_s = now_s
            self._draw_training(trainer)

    def on_log(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        """Show a record."""
        if not trainer.world.is_main:
            return
        record = {"step": trainer.global_step, "epoch": trainer.current_epoch, "attempt": trainer.attempt, **metrics}
        is_training = "elapsed_s" in record
        if is_training:
            self._record = record
            self._left_s, self._left_at = self._pace.left_s(record, trainer.total_steps), trainer.global_step
        if not self._is_live or not is_training:
            left_s = None if self._is_live else self._left_s
            self.print(progress_line(record, total_steps=trainer.total_steps, left_s=left_s))
        else:
            self._draw_training(trainer)

    def on_evaluation_start(self, trainer: Any) -> None:
        """Remember the bar, to restore it after the evaluation."""
        self._interrupted = self._drawn

    def on_evaluation_batch_end(self, trainer: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Show the progress of the evaluation instead of the bar."""
        now_s = time.monotonic()
        if now_s - self._drawn_s >= _REDRAW_S and self._is_live and trainer.world.is_main:
            self._drawn_s = now_s
            self._draw(f"evaluating · batch {batch_idx + 1:,}")

    def on_evaluation_end(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        """Restore the bar."""
        self._draw(self._interrupted)

    def on_fit_end(self, trainer: Any, error: BaseException | None) -> None:
        """Remove the bar; its last state stays as a line."""
        last, self._drawn = self._drawn, ""
        if last:
            self._write(f"{_ERASE_LINE}{last}\n")

    def print(self, text: str) -> None:
        """Write a line above the bar."""
        drawn = self._drawn
        self._draw("")
        self._write(f"{text}\n")
        self._draw(drawn)

    @property
    def _is_live(self) -> bool:
        if self._live is None:
            self._live = (self._stream or sys.stdout).isatty()
        return self._live

    def _draw_training(self, trainer: Any) -> None:
        step, total_steps = trainer.global_step, trainer.total_steps
        record = {**self._record, "step": step, "epoch": trainer.current_epoch}
        left_s = self._left_s
        if left_s is not None and total_steps and total_steps > self._left_at:
            left_s *= (total_steps - step) / (total_steps - self._left_at)
        line = progress_line(record, total_steps=total_steps, left_s=left_s)
        self._draw(f"{_bar(step / total_steps)} {line}" if total_steps else line)

    def _draw(self, text: str) -> None:
        if text or self._drawn:
            text = text[: shutil.get_terminal_size().columns - 1]
            self._write(f"{_ERASE_LINE}{text}")
            self._drawn = text

    def _write(self, text: str) -> None:
        stream = self._stream or sys.stdout
        stream.write(text)
        stream.flush()


class Pace:
    """Seconds per update, smoothed over records, to estimate the time left.

    Example:
        >>> pace = Pace()
        >>> pace.left_s({"step": 1, "attempt": 1}, total_steps=100)
        >>> pace.left_s({"step": 50, "attempt": 1, "step_s": 0.5}, total_steps=100)
        25.0
    """

    def __init__(self) -> None:
        self._attempt: object = None
        self._step_s: float | None = None

    def left_s(self, record: Mapping[str, Any], total_steps: int | None) -> float | None:
        """Add a training record and return the seconds of training left, or None while unknown.

        Args:
            record: with "step" and "attempt", and with "step_s" unless it covers only the first update of an attempt.
            total_steps: updates of the whole run; None if unknown.
        """
        if record["attempt"] != self._attempt:
            self._attempt, self._step_s = record["attempt"], None
        if "step_s" in record:
            new_s = float(record["step_s"])
            self._step_s = new_s if self._step_s is None else 0.7 * self._step_s + 0.3 * new_s
        if total_steps is None or self._step_s is None:
            return None
        return max(total_steps - int(record["step"]), 0) * self._step_s


def progress_line(record: Mapping[str, Any], *, total_steps: int | None = None, left_s: float | None = None) -> str:
    """Format a record: `step 1,250/5,000 · epoch 2 · loss 1.234 · 45,120 tokens/s · 3m12s left`.

    Args:
        record: with "step" and "epoch", and optionally "train/loss", "tokens_per_s" or "samples_per_s", "data_wait"
            (the share of time spent waiting for data) and metrics under "validation/". As passed to trackers, or as
            read from `metrics.jsonl`, where NaN is a string.
        total_steps: updates of the whole run; None if unknown.
        left_s: see `Pace`.
    """
    parts = [f"step {record['step']:,}" + (f"/{total_steps:,}" if total_steps else ""), f"epoch {record['epoch']}"]
    if "train/loss" in record:
        parts.append(f"loss {float(record['train/loss']):.4g}")
    parts += [f"{name} {float(value):.4g}" for name, value in record.items() if name.startswith("validation/")]
    for unit in ("tokens", "samples"):
        if f"{unit}_per_s" in record:
            parts.append(f"{float(record[f'{unit}_per_s']):,.0f} {unit}/s")
            break
    if "data_wait" in record:
        parts.append(f"data {record['data_wait']:.0%}".replace("%", " %"))
    if left_s is not None:
        parts.append(f"{human_duration(left_s)} left")
    return " · ".join(parts)


def _bar(share: float) -> str:
    done = round(min(share, 1.0) * _BAR_WIDTH)
    return f"{'━' * done}{'╌' * (_BAR_WIDTH - done)} {min(share, 1.0):4.0%}"
