"""Print records as lines of text."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .base import RunInfo, Tracker


class ConsoleTracker(Tracker):
    """Prints one line per record with all of its metrics: `step 50 · epoch 0 · train/loss 1.234 · lr 0.001`.

    Args:
        write: called with each line; pass `trainer.print` to share a terminal with a progress bar.

    Example:
        >>> ConsoleTracker().log({"train/loss": 1.5}, step=50, epoch=0)
        step 50 · epoch 0 · train/loss 1.5
    """

    def __init__(self, write: Callable[[str], object] = print) -> None:
        self._write = write

    def start(self, run: RunInfo, *, step: int) -> None:
        """Print the name of the run and the step from which it resumes."""
        self._write(
            f"{run.name} · attempt {run.attempt} · "
            + (f"resumed after step {step:,}" if run.resumed else "from the start")
        )

    def log(self, metrics: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Print a record."""
        numbers = (
            f"{name} {value:,.0f}" if abs(value) >= 1000 else f"{name} {value:.4g}" for name, value in metrics.items()
        )
        self._write(" · ".join((f"step {step:,}", f"epoch {epoch}", *numbers)))

    def finish(self, status: str) -> None:
        """Print how the run ended."""
        self._write(status)
