"""Checkpoints during a run, written while the loop waits or in the background."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ..checkpoints.background import BackgroundSave
from ..checkpoints.store import Checkpoint
from ..errors import CheckpointError
from ..metrics.train_log import Recorder
from ..step.optimizer_step import OptimizerStep
from .context import RunContext
from .control import Requests
from .progress import Schedule
from .run_state import RunState

T = TypeVar("T")

_TIMEOUT_S = 10.0


class Saver:
    """Saves the state of a run between two updates. Every rank must call `save`, `start` and `finish`.

    Args:
        ctx: of the run.
        state: is saved.
        optimizer_step: waits for the copy of a background save before the next optimizer step.
        recorder: does not count the time of saves in the throughput.
        requests: reports when a background save has ended on every rank.

    Attributes:
        schedule: when a checkpoint is due.
        check_unsaved: called before each checkpoint, see `UnsavedState`.
        took_s: from the start of the last checkpoint to its commit; None before the first.
    """

    def __init__(
        self, ctx: RunContext, state: RunState, optimizer_step: OptimizerStep, recorder: Recorder, requests: Requests
    ) -> None:
        self._ctx, self._state, self._optimizer_step = ctx, state, optimizer_step
        self._recorder, self._requests = recorder, requests
        self._in_background: BackgroundSave | None = None
        self._began_s = 0.0
        self.schedule = Schedule(ctx.config.checkpoint.every)
        self.took_s: float | None = None
        self._has_rehearsed = False
        self.check_unsaved: Callable[[], None] | None = None

    def save(self) -> Checkpoint:
        """Save the state, and wait until it is written."""
        checkpoint = self._begin(self._state.save)
        self._report(checkpoint)
        return checkpoint

    def save_to(self, path: str) -> Checkpoint:
        """Save the state at a path of the user's, which does not count as a checkpoint of the run."""
        self.finish()
        self._optimizer_step.check_pending_norms()
        with self._in_phase():
            self._ctx.callbacks.on_checkpoint_start()
            return self._state.save_to(path)

    def start(self) -> BackgroundSave:
        """Start saving the state in the background; `finish` ends it."""
        saving = self._begin(self._state.begin_save)
        self._in_background = saving
        self._optimizer_step.wait_for_snapshot = saving.wait_for_snapshot
        self._requests.watch(saving)
        return saving

    def rehearse(self) -> None:
        """Prepare for background saves, if they are to come; called after each update, of which only the first counts.

        Optimizers have no state before.
        """
        if not self._has_rehearsed:
            self._has_rehearsed = True
            checkpoint = self._ctx.config.checkpoint
            is_coming = self._ctx.run_dir is not None and checkpoint.every is not None and checkpoint.background
            if is_coming and self._in_background is None:
                with self._in_phase():
                    self._state.rehearse_save()

    def finish(self) -> None:
        """Wait for a background save, and call the hooks. Every rank must call this at the same update."""
        if self._in_background is None:
            return
        saving, self._in_background = self._in_background, None
        self._requests.watch(None)
        with self._in_phase():
            checkpoint = saving.result()
        self._report(checkpoint)

    def wait_for_snapshot(self) -> None:
        """Wait until a background save has copied the state, for example before averages replace the weights."""
        if self._in_background is not None:
            self._in_background.wait_for_snapshot()

    def clean_up(self) -> None:
        """Wait a limited time for the background save of a failed run. No collectives: other ranks may be gone."""
        if self._in_background is not None:
            self._in_background.wait(None if self._ctx.world.size == 1 else _TIMEOUT_S)
            self._requests.watch(None)

    def discard(self) -> None:
        """Wait for the background save of a failed run, which must not write while another run saves."""
        if self._in_background is not None:
            self._in_background.wait(None)
            self._in_background = self._state.last_saved_step = None

    def _begin(self, save: Callable[[], T]) -> T:
        self.finish()
        self._optimizer_step.check_pending_norms()
        self._began_s = time.perf_counter()
        if self.check_unsaved is not None:
            self.check_unsaved()
        with self._in_phase():
            self._ctx.callbacks.on_checkpoint_start()
            started = save()
        self.schedule.done(self._ctx.progress.elapsed_s)
        return started

    def _report(self, checkpoint: Checkpoint) -> None:
        self.took_s = time.perf_counter() - self._began_s
        self._ctx.callbacks.on_checkpoint_saved(checkpoint)

    @contextmanager
    def _in_phase(self) -> Iterator[None]:
        with self._ctx.activity.during("saving"), self._recorder.paused():
            try:
                yield
            except CheckpointError as error:
                try:
                    self._ctx.callbacks.on_checkpoint_failed(error)
                except Exception as failure:
                    error.add_note(f"on_checkpoint_failed also raised {type(failure).__name__}: {failure}")
                raise
