"""Requests that arrive while the training thread waits for a batch."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from ..checkpoints.rng import GeneratorsBefore
from .control import Requests
from .signals import interrupt_main_thread

T = TypeVar("T")

_EVERY_S = 0.25
_AFTER_S = 0.5


class StopReading(BaseException):
    """Raised inside the code that reads data, in the training thread, to end a read after a stop request."""


class BlockedReads:
    """Serves save and stop requests while the training thread waits for a batch, in a process that trains alone.

    Another thread looks for requests. It saves while the training thread is inside a read, between two updates, and
    which it cannot leave meanwhile; and ends the read if the run is to stop. On several ranks others may be inside the
    update already, so requests wait for the batch.

    Args:
        requests: of the run.
        save: saves a checkpoint, with these random states, if one was requested; called in the other thread.

    Attributes:
        was_ended: whether the last read was ended by a stop request; the random states are those of before it.
        saving_s: seconds spent saving inside reads.
    """

    def __init__(self, requests: Requests, save: Callable[[GeneratorsBefore], None]) -> None:
        self._requests, self._save = requests, save
        self._generators = GeneratorsBefore()
        # The training thread leaves a read when `_is_served` is False after it has cleared `_is_reading`, or with the
        # lock; the other thread serves requests only if `_is_reading` is True after it has set `_is_served`.
        self._lock = threading.Lock()
        self._is_reading = self._is_served = self._may_save = False
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._reader, self._began_s = 0, 0.0
        self._error: BaseException | None = None
        self.was_ended = False
        self.saving_s = 0.0

    def start(self) -> None:
        """Start looking for requests."""
        self._error, self.was_ended = None, False
        self._closing.clear()
        self._thread = threading.Thread(target=self._watch, name="headway-blocked-reads", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop looking for requests."""
        if self._thread is not None:
            self._closing.set()
            self._thread.join()
            self._thread, self.was_ended = None, False

    def next(self, batches: Iterator[T], *, in_training: bool, draws: bool = True) -> T | None:
        """Return the next batch; None at the end, or if a request ended the read.

        Args:
            batches: is read.
            in_training: whether the read is between two updates; a stop request also ends one of an evaluation.
            draws: whether reading may use the random generators of this process.

        Raises:
            Exception: from reading, or from a save that was requested meanwhile.
        """
        if self._thread is None:
            return next(batches, None)
        self._began_s = time.perf_counter()
        if in_training:
            self._generators.capture(self._began_s, may_change=draws)
        self._may_save, self._reader, self.was_ended = in_training, threading.get_ident(), False
        self._is_reading = True
        batch: T | None = None
        try:
            try:
                batch = next(batches, None)
            finally:
                self._leave()
        except (Exception, StopReading):
            # StopReading may come at any time before the read is left, and the code that reads may have converted it.
            self._leave()
            if not self.was_ended:
                raise
        if not self.was_ended:
            return batch
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if in_training:
            self._generators.restore()
        return None

    def _leave(self) -> None:
        """Leave a read, when no request is being served."""
        self._is_reading = False
        if self._is_served:
            with self._lock:
                pass
        if self.was_ended:
            # Withdraw the exception, if it has not been raised yet.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._reader), None)

    def _watch(self) -> None:
        while not self._closing.wait(_EVERY_S):
            waits = self._is_reading and time.perf_counter() - self._began_s >= _AFTER_S
            if not waits or not self._requests.is_pending or self.was_ended:
                continue
            with self._lock:
                self._is_served = True
                try:
                    if self._is_reading:
                        self._serve()
                except BaseException as error:
                    self._error = error
                    self._end_read()
                finally:
                    self._is_served = False

    def _serve(self) -> None:
        """Handle the pending requests; the training thread is inside a read."""
        if self._may_save:
            if not self._generators.are_known:
                return
            began_s = time.perf_counter()
            self._save(self._generators)
            self.saving_s += time.perf_counter() - began_s
        if self._requests.stop_is_pending:
            self._end_read()

    def _end_read(self) -> None:
        self.was_ended = True
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._reader), ctypes.py_object(StopReading))
        if self._reader == threading.main_thread().ident:
            interrupt_main_thread()
