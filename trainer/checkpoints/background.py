"""Background saves, while training continues."""

from __future__ import annotations

import atexit
import concurrent.futures
from collections.abc import Callable
from concurrent.futures import Future

from ..worker_thread import WorkerThread
from .format.manifest import Checkpoint


class BackgroundSave:
    """One checkpoint that is being written. Each rank has one; their save threads communicate only with each other.

    Args:
        written: future of the checkpoint.
        wait_for_snapshot: function that waits until the tensors being saved may change.
    """

    def __init__(self, written: Future[Checkpoint], wait_for_snapshot: Callable[[], None]) -> None:
        self.wait_for_snapshot = wait_for_snapshot
        self._written = written

    @property
    def is_done(self) -> bool:
        """Whether the save has ended on this rank, with or without an error."""
        return self._written.done()

    def result(self) -> Checkpoint:
        """Wait for the save and return the checkpoint.

        Raises:
            CheckpointError: the save failed on some rank; earlier checkpoints are untouched.
        """
        return self._written.result()

    def wait(self, timeout_s: float | None) -> None:
        """Wait until the save has ended, successfully or not, or until the timeout."""
        concurrent.futures.wait([self._written], timeout_s)


class BackgroundSaver:
    """The save threads of one rank: one copies tensors, and one writes files.

    They are reused, because starting a thread is slow when training keeps all cores busy. They have the priority of the
    training: at a low one, a machine that is busy takes several times as long for a save, also when training waits for
    it, and lost as much time. Writing in a separate process was measured too: for 200 MB it used 0.46 s of extra CPU
    time, a thread 0.31 s, and the process needs 200 MB of memory for its interpreter and torch.
    """

    def __init__(self) -> None:
        self._copier = WorkerThread("headway-copy")
        self._writer = WorkerThread("headway-save")

    def begin(
        self,
        copy: Callable[[], None],
        write: Callable[[], Checkpoint],
        *,
        wait_for_snapshot: Callable[[], None],
        waits_at_exit: bool,
    ) -> BackgroundSave:
        """Start a save; the previous one must have ended.

        Args:
            copy: copies the tensors being saved.
            write: writes and commits the copies.
            wait_for_snapshot: waits until the tensors being saved may change.
            waits_at_exit: whether Python waits for the save before it exits. Only with one rank: once other ranks
                are gone, the save might never end.
        """
        written: Future[Checkpoint] = Future()

        def begin() -> None:
            try:
                copy()
            finally:
                self._writer.submit(write, written)

        saving = BackgroundSave(written, wait_for_snapshot)
        if waits_at_exit:
            atexit.register(saving.wait, None)
            written.add_done_callback(lambda _: atexit.unregister(saving.wait))
        self._copier.submit(begin, Future())
        return saving

    def rehearse(self, copy: Callable[[], None]) -> None:
        """Start a copy that is not written; the next save begins after it."""
        copied = self._copier.submit(copy, Future())
        # A thread that copies while Python exits would abort the process.
        atexit.register(copied.exception)
        copied.add_done_callback(lambda _: atexit.unregister(copied.exception))
