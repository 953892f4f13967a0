"""A single long-lived worker thread; starting a thread is slow when all cores are busy."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class WorkerThread:
    """Runs tasks in one thread, in order. The thread starts with the first task and ends with this object.

    It is a daemon thread: Python does not wait for it at exit.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._has_begun = False

    def submit(self, task: Callable[[], T], outcome: Future[T]) -> Future[T]:
        """Queue `task`; its result or exception is set on `outcome`."""
        if not self._has_begun:
            self._has_begun = True
            threading.Thread(target=_work, args=(self._tasks,), name=self._name, daemon=True).start()
            # Not at exit, when the result of another task may still be needed.
            weakref.finalize(self, self._tasks.put, None).atexit = False
        self._tasks.put((task, outcome))
        return outcome


def _work(tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]) -> None:
    while (given := tasks.get()) is not None:
        task, outcome = given
        result = error = None
        try:
            result = task()
        except BaseException as raised:
            error = raised
        # Free the task before setting the outcome: Python may exit then, and a thread that frees tensors would abort.
        del given, task
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)
        del outcome, result, error
