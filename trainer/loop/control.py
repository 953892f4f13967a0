"""Requests to a running loop (stop, save, evaluate) from any rank, on which all ranks agree at the same update."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ..checkpoints.background import BackgroundSave
from ..distributed.gather_order import differing_gathers
from ..distributed.world import World

StopStatus = Literal["stopped", "time_limit", "interrupted"]
WITHIN_S = 0.25
_MOST_UPDATES = 32
_LONGEST_US = 2**31 - 1  # int32 is what every backend can reduce
_STATUSES: tuple[StopStatus, ...] = ("stopped", "time_limit", "interrupted")


@dataclass(frozen=True, slots=True)
class Agreed:
    """The requests that all ranks handle at this update.

    Attributes:
        evaluate, save: whether an evaluation or a checkpoint is requested.
        at_once: whether the checkpoint may interrupt an evaluation.
        stop: final status if the run stops now, else None.
        saved: whether the background save has ended on every rank.
    """

    evaluate: bool = False
    save: bool = False
    at_once: bool = False
    stop: StopStatus | None = None
    saved: bool = False


_NOTHING = Agreed()


class Requests:
    """Collects requests from hooks, signal handlers and other threads, on which all ranks agree.

    With one rank, a request takes effect at the current update. With several, `agree` never waits for another rank: it
    starts a small all-reduce after one update and reads it after the next, when it has long completed. It does so every
    `WITHIN_S` seconds, but at least every `_MOST_UPDATES` updates: if ranks share cores, a collective costs a large
    part of a short update. A request takes effect about that much later, at the same update on every rank. After an
    evaluation and at the end of an epoch, where all ranks synchronize anyway, `agree_now` makes it take effect
    immediately.

    Attributes:
        fingerprint: returns a number below 2**31 that must be equal on all ranks after the same update, see
            `GatherOrder`.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        # Deques, because `append` and `popleft` cannot lose a request of another thread or of a signal handler.
        self._evaluations, self._saves, self._stop = deque[int](), deque[int](), 0
        self._in_flight: tuple[torch.Tensor, Any] | None = None
        # Updates until the next reduction is read; it starts one update before.
        self._interval, self._left = 1, 2
        self._updates = 0
        self._began_s = time.perf_counter()
        self._saving: BackgroundSave | None = None
        self.fingerprint: Callable[[], int] = int
        self._covers_save = self._gave_save = False
        self.stop_reason = ""

    def watch(self, saving: BackgroundSave | None) -> None:
        """Report the end of this save on every rank by `Agreed.saved`. Every rank must call this at the same update."""
        self._saving = saving

    def evaluate(self) -> None:
        """Request an evaluation. Any rank may call this, from any thread."""
        self._evaluations.append(1)

    def save(self, *, at_once: bool = False) -> None:
        """Request a checkpoint, with `at_once` also during an evaluation. Any rank may call this, from any thread."""
        self._saves.append(2 if at_once else 1)

    def stop(self, reason: str, status: StopStatus) -> None:
        """Request an orderly stop; the first reason counts. Any rank may, from any thread or signal handler."""
        self.stop_reason = self.stop_reason or reason or "a request without a reason"
        self._stop = max(self._stop, 1 + _STATUSES.index(status))

    @property
    def is_pending(self) -> bool:
        """Whether this rank has a request to save or to stop."""
        return bool(self._saves or self._stop)

    @property
    def save_is_pending(self) -> bool:
        """Whether this rank has a request to save."""
        return bool(self._saves)

    @property
    def save_is_requested(self) -> bool:
        """Whether this rank has a request to save, or has given one to a reduction that has not been read."""
        return bool(self._saves) or self._gave_save

    @property
    def stop_is_pending(self) -> bool:
        """Whether this rank has a request to stop."""
        return bool(self._stop)

    def take_save(self) -> bool:
        """Return whether this rank has a request to save, and remove it; a save outside of `agree` serves it."""
        return bool(_take_highest(self._saves))

    def recall(self) -> None:
        """Turn what a pending reduction has found back into requests of this rank.

        Every rank must call this after the same update, from any thread while the training thread is inside a read, and
        only when all ranks are known to have made that update: it waits for none.
        """
        if self._in_flight is None:
            return
        agreed = self._read()
        self._left = 2
        if agreed.evaluate:
            self.evaluate()
        if agreed.save:
            self.save(at_once=agreed.at_once)

    def agree(self, *, often: bool = False) -> Agreed:
        """Return the requests to handle at this update. Every rank must call this, once per update.

        Args:
            often: agrees from one call to the next, whatever the interval, because calls may be further apart than
                updates.
        """
        if self._world.size == 1:
            saved = self._saving is not None and self._saving.is_done
            return _as_agreed(self._drain(), saved=saved) if saved or self._evaluations or self.is_pending else _NOTHING
        self._updates += 1
        self._left = min(self._left, 2) if often else self._left
        self._left -= 1
        agreed = _NOTHING
        if self._left == 0:
            agreed = self._read()
            self._left = 1 if often else self._interval
        if self._left == 1:
            self._begin()
        return agreed

    def agree_now(self) -> Agreed:
        """Return the requests of any rank up to now. Waits for all ranks. Every rank must call this."""
        if self._world.size == 1:
            return self.agree()
        earlier = self._read()
        self._begin()
        now = self._read()
        self._left = self._interval + 1
        return replace(
            now,
            evaluate=earlier.evaluate or now.evaluate,
            save=earlier.save or now.save,
            at_once=earlier.at_once or now.at_once,
        )

    def close(self) -> None:
        """Wait for a pending reduction, so that no collective is left over. Every rank must call this."""
        self._read()
        self._left = 2

    def clear(self) -> None:
        """Drop all requests, at the end of a run."""
        self._evaluations.clear()
        self._saves.clear()
        self._stop, self.stop_reason = 0, ""
        # After an error a reduction may be pending: its result belongs to the old run, and ranks may be out of step.
        self._in_flight, self._gave_save = None, False
        self._interval, self._left = 1, 2

    def _drain(self) -> list[int]:
        return [_take_highest(self._evaluations), _take_highest(self._saves), self._stop]

    def _begin(self) -> None:
        now_s = time.perf_counter()
        update_us = min(int((now_s - self._began_s) / max(self._updates, 1) * 1e6), _LONGEST_US)
        self._began_s, self._updates = now_s, 0
        # All ranks derive the same interval from the longest update of any rank.
        # A save that starts during the reduction must not be reported as ended.
        self._covers_save = self._saving is not None
        is_busy = self._saving is not None and not self._saving.is_done
        requests = self._drain()
        self._gave_save = bool(requests[1])
        number = self.fingerprint()
        values = torch.tensor([*requests, int(is_busy), update_us, number, -number], dtype=torch.int32)
        self._in_flight = values, self._world.all_reduce_max_async(values)

    def _read(self) -> Agreed:
        if self._in_flight is None:
            return _NOTHING
        tensor, work = self._in_flight
        self._in_flight, self._gave_save = None, False
        work.wait()
        *values, is_busy, update_us, highest, lowest = tensor.tolist()
        if highest != -lowest:
            raise differing_gathers()
        self._interval = max(1, min(_MOST_UPDATES, int(WITHIN_S * 1e6 / max(update_us, 1))))
        saved = self._covers_save and not is_busy
        return _as_agreed(values, saved=saved) if saved or any(values) else _NOTHING


def _take_highest(requests: deque[int]) -> int:
    highest = 0
    while requests:
        highest = max(highest, requests.popleft())
    return highest


def _as_agreed(values: list[int], *, saved: bool) -> Agreed:
    evaluate, save, stop = values
    status = _STATUSES[stop - 1] if stop else None
    return Agreed(evaluate=bool(evaluate), save=bool(save), at_once=save == 2, stop=status, saved=saved)
