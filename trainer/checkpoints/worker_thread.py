"""A thread that waits for work, so that whoever has some need not wait for a thread."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_NICE = 10


class WorkerThread:
    """One thread that does what it is given, in that order. It begins with the first, and ends with this object.

    Python does not wait for it at its end.

    Args:
        name: of the thread.
        is_behind: whether all others go first where cores are scarce; on Linux, where a thread has a priority.
    """

    def __init__(self, name: str, *, is_behind: bool = False) -> None:
        self._name, self._is_behind = name, is_behind
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._has_begun = False

    def submit(self, task: Callable[[], T], outcome: Future[T]) -> Future[T]:
        """Does it, after all that was given before, and lets the future know what came of it."""
        if not self._has_begun:
            self._has_begun = True
            threading.Thread(target=_work, args=(self._tasks, self._is_behind), name=self._name, daemon=True).start()
            # At the end of Python somebody may still wait for work.
            weakref.finalize(self, self._tasks.put, None).atexit = False
        self._tasks.put((task, outcome))
        return outcome


def _work(tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None], is_behind: bool) -> None:
    if is_behind:
        with contextlib.suppress(AttributeError, OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    while (given := tasks.get()) is not None:
        task, outcome = given
        result = error = None
        try:
            result = task()
        except BaseException as raised:
            error = raised
        # Before anybody hears of the end, which may be that of Python: a thread that frees tensors then is an abort.
        del given, task
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)
        del outcome, result, error
