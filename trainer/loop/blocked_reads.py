"""Requests that arrive while the training thread waits for a batch."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from torch.distributed.distributed_c10d import PrefixStore

from ..checkpoints.rng import GeneratorsBefore
from ..distributed.world import World, set_group_timeout
from .common_read import CommonRead
from .control import Requests
from .signals import interrupt_main_thread

T = TypeVar("T")

_EVERY_S = 0.25
_AFTER_S = 0.5
_MOST_NUMBERS = 5


class StopReading(BaseException):
    """Raised inside the code that reads data, in the training thread, to end a read after a stop request."""


class BlockedReads:
    """Serves save and stop requests while the training thread waits for a batch.

    Another thread looks for requests. It saves while the training thread is inside a read, between two updates, and
    which it cannot leave meanwhile; and ends the read if the run is to stop.

    On several ranks others may be inside the update already, unless the ranks `agree` on each batch before they use it.
    Then they repeat that sum until no rank waits for its batch: for a rank that waits, the other thread takes part. A
    request that is known in such a round is served by all ranks; those that have a batch do not use it if the run is to
    stop.

    Where they need not agree, a request is served while all ranks wait for the same batch (`CommonRead`).

    Args:
        requests: of the run.
        save: called as `save(generators, save, stop)` to save a checkpoint with these random states, if a rank has
            requested one or the run stops; in the other thread, or in the training thread if this rank has its batch.
        world: the ranks.
        agrees: whether some data needs `agree`, in a process group of its own; equal on every rank.
        timeout_s: how long a rank waits in `agree` for the batches of others.

    Attributes:
        was_ended: whether the last read was ended by a stop request; the random states are those of before it.
        saving_s: seconds spent saving inside reads.
        timeout_s: as above.
    """

    def __init__(
        self,
        requests: Requests,
        save: Callable[[GeneratorsBefore, bool, bool], None],
        world: World,
        *,
        agrees: bool,
        timeout_s: float,
    ) -> None:
        self._requests, self._save = requests, save
        self._ranks, self._agrees = world, agrees and world.size > 1
        self._generators = GeneratorsBefore()
        # The training thread leaves a read when `_is_served` is False after it has cleared `_is_reading`, or with the
        # lock; the other thread serves requests only if `_is_reading` is True after it has set `_is_served`.
        self._lock = threading.Lock()
        self._is_reading = self._is_served = self._may_save = False
        # Where ranks do not agree on a batch; `_in_common` is set while one is read.
        self._common: CommonRead | None = None
        self._in_common: CommonRead | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._reader, self._began_s = 0, 0.0
        self._error: BaseException | None = None
        self.was_ended = False
        self.saving_s = 0.0
        self.rejoin(timeout_s=timeout_s)

    def rejoin(self, *, timeout_s: float) -> None:
        """Create a process group for the two threads, which use it in turn. Every rank must call this."""
        self.timeout_s = timeout_s
        self._world = self._ranks.with_own_group(timeout_s=timeout_s) if self._agrees else self._ranks
        if self._agrees and self._world.control is not None:
            # Changes with parallel.step_timeout.
            set_group_timeout(self._world.control, timeout_s)

    def start(self) -> None:
        """Start looking for requests, if they can be served inside reads. Every rank must call this."""
        self._error, self.was_ended = None, False
        self._common = self._in_common = None
        if (store := self._ranks.store) is not None:
            (number,) = self._ranks.sum_ints(store.add("headway-runs", 1) if self._ranks.is_main else 0)
            self._common = CommonRead(PrefixStore(f"headway-reads-{number}", store), self._ranks.size)
        if self._world.size > 1 and not self._agrees and self._common is None:
            return
        self._closing.clear()
        self._thread = threading.Thread(target=self._watch, name="headway-blocked-reads", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop looking for requests."""
        if self._thread is not None:
            self._closing.set()
            self._thread.join()
            self._thread, self.was_ended = None, False

    def next(self, batches: Iterator[T], *, in_training: bool, draws: bool = True, agrees: bool = False) -> T | None:
        """Return the next batch; None at the end, or if a request ended the read.

        Args:
            batches: is read.
            in_training: whether the read is between two updates; a stop request also ends one of an evaluation.
            draws: whether reading may use the random generators of this process.
            agrees: whether every rank calls `agree` afterwards, unless the read was ended.

        Raises:
            Exception: from reading, or from a save that was requested meanwhile.
        """
        self.was_ended = False
        is_common = self._world.size > 1 and not agrees
        if self._thread is None or (is_common and self._common is None):
            return next(batches, None)
        self._began_s = time.perf_counter()
        if in_training:
            self._generators.capture(self._began_s, may_change=draws)
        self._may_save, self._reader = in_training, threading.get_ident()
        self._in_common = self._common if is_common else None
        if self._in_common is not None:
            self._in_common.begin(in_training=in_training)
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

    def agree(self, *numbers: int) -> list[int]:
        """Return the sums of some numbers over all ranks, once each has its batch. Every rank must call this.

        If `was_ended` is True afterwards, a stop request was served instead, and the batch must not be used.

        Args:
            numbers: at most 5, equally many on every rank.

        Raises:
            CheckpointError: from a save that was requested meanwhile.
            TimeoutError: another rank has waited for its batch for too long.
        """
        padded = (*numbers, *[0] * (_MOST_NUMBERS - len(numbers)))
        # Most of the time no rank waits: what only a request needs is found out from the second round on.
        num_waiting, sums = self._take_part(padded, waits=False, can_serve=False)
        began_s = time.perf_counter()
        while num_waiting and not self.was_ended:
            if time.perf_counter() - began_s > self.timeout_s:
                raise TimeoutError(
                    f"{num_waiting} of {self._world.size} ranks have waited for a batch for more than "
                    f"{self.timeout_s:g} s: raise parallel.timeout (or parallel.step_timeout), or look for what blocks "
                    "the data there"
                )
            num_waiting, sums = self._take_part(padded, waits=False, can_serve=self._can_serve())
        return sums[: len(numbers)]

    def _leave(self) -> None:
        """Leave a read, when no request is being served."""
        self._is_reading = False
        if self._is_served:
            with self._lock:
                pass
        if self.was_ended:
            # Withdraw the exception, if it has not been raised yet.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._reader), None)
        elif self._in_common is not None and self._in_common.leave():
            self._serve_in_common()

    def _watch(self) -> None:
        is_alone = self._world.size == 1
        while not self._closing.wait(_EVERY_S):
            waits = self._is_reading and time.perf_counter() - self._began_s >= _AFTER_S
            if not waits or self.was_ended or (is_alone and not self._requests.is_pending):
                continue
            if self._in_common is not None and self._in_common.is_over:
                continue
            with self._lock:
                self._is_served = True
                try:
                    # The training thread is inside a read.
                    if self._is_reading and is_alone and self._can_serve():
                        self._serve(save=self._requests.save_is_pending, stop=self._requests.stop_is_pending)
                    elif self._is_reading and self._in_common is not None:
                        requests = self._requests
                        wants = requests.stop_is_pending or (self._may_save and requests.save_is_requested)
                        if self._in_common.look(wants=wants):
                            self._serve_in_common()
                    elif self._is_reading and not is_alone:
                        self._take_part((0,) * _MOST_NUMBERS, waits=True, can_serve=self._can_serve())
                except BaseException as error:
                    self._error = error
                    self._end_read()
                finally:
                    self._is_served = False

    def _can_serve(self) -> bool:
        return not self._may_save or self._generators.are_known

    def _take_part(self, numbers: tuple[int, ...], *, waits: bool, can_serve: bool) -> tuple[int, list[int]]:
        """Sum numbers over the ranks, and serve requests if a rank waits; return the number of those that do."""
        requests = self._requests
        flags = waits, can_serve, requests.save_is_pending, requests.stop_is_pending
        num_waiting, num_able, saves, stops, *sums = self._world.sum_ints(*flags, *numbers)
        if num_waiting:
            # Every rank has made the same updates; what they have agreed upon meanwhile would take effect after the
            # next. It is served in the next round.
            requests.recall()
            if num_able == self._world.size and (saves or stops):
                self._serve(save=bool(saves), stop=bool(stops))
        return num_waiting, sums

    def _serve_in_common(self) -> None:
        """Serve requests of any rank, while all ranks wait for the same batch, or have just got it."""
        requests = self._requests
        requests.recall()  # as in `_take_part`
        num_able, saves, stops = self._ranks.sum_ints(
            self._can_serve(), requests.save_is_pending, requests.stop_is_pending
        )
        if num_able == self._ranks.size and (saves or stops):
            self._serve(save=bool(saves), stop=bool(stops))

    def _serve(self, *, save: bool, stop: bool) -> None:
        """Save and stop as requested. On several ranks, all do so in the same round."""
        if self._may_save:
            self._requests.take_save()
            began_s = time.perf_counter()
            self._save(self._generators, save, stop)
            self.saving_s += time.perf_counter() - began_s
        if stop and self._is_reading:
            self._end_read()
        elif stop:
            self.was_ended = True
            if self._may_save:
                self._generators.restore()

    def _end_read(self) -> None:
        self.was_ended = True
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._reader), ctypes.py_object(StopReading))
        if self._reader == threading.main_thread().ident:
            interrupt_main_thread()
