"""What somebody asks of a run while it trains, on any rank, agreed by all ranks at the same update."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ..checkpoints.background import BackgroundSave
from ..distributed.world import World

StopStatus = Literal["stopped", "time_limit", "interrupted"]
WITHIN_S = 0.25
_MOST_UPDATES = 32
_LONGEST_US = 2**31 - 1  # int32 is what every backend can reduce
_STATUSES: tuple[StopStatus, ...] = ("stopped", "time_limit", "interrupted")


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks are to do now.

    Attributes:
        evaluate, save: somebody asked for it.
        at_once: the checkpoint is wanted before an evaluation is over.
        stop: how the run is to be called that ends here, or None to go on.
        saved: the save in the background has ended on every rank.
    """

    evaluate: bool = False
    save: bool = False
    at_once: bool = False
    stop: StopStatus | None = None
    saved: bool = False


_NOTHING = Agreed()


class Requests:
    """Collects requests from hooks, signal handlers and other threads, and lets all ranks agree on them.

    Alone, a request holds at the update that it was made in. On several ranks `agree` never makes the loop wait for
    another rank: it begins a tiny reduction after one update and reads it after the next, when it has long arrived.
    It does so every `WITHIN_S`, or every `_MOST_UPDATES` where updates are short: ranks that share cores pay for a
    collective with a good part of a short update. So a request takes effect about that long after it was made, on
    every rank at the same update; after an evaluation and at the end of an epoch, where all ranks meet anyway,
    `agree_now` has it take effect there.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._requested = [0, 0, 0]
        self._in_flight: tuple[torch.Tensor, Any] | None = None
        # Counts updates: a reduction begins where 1 is left, and is read where none is.
        self._interval, self._left = 1, 2
        self._updates = 0
        self._began_s = time.perf_counter()
        self._saving: BackgroundSave | None = None
        self._covers_save = False
        self.stop_reason = ""

    def watch(self, saving: BackgroundSave | None) -> None:
        """Tells by `Agreed.saved` when this has ended on every rank. Every rank must call this at the same update."""
        self._saving = saving

    def evaluate(self) -> None:
        """Asks for an evaluation. Any rank may, from any thread."""
        self._requested[0] = 1

    def save(self, *, at_once: bool = False) -> None:
        """Asks for a checkpoint, where that is so by cutting an evaluation short. Any rank may, from any thread."""
        self._requested[1] = max(self._requested[1], 2 if at_once else 1)

    def stop(self, reason: str, status: StopStatus) -> None:
        """Asks for an orderly end. Any rank may, from any thread or signal handler; the first reason stays."""
        self.stop_reason = self.stop_reason or reason or "a request without a reason"
        self._requested[2] = max(self._requested[2], 1 + _STATUSES.index(status))

    def agree(self, *, often: bool = False) -> Agreed:
        """Returns what all ranks are to do at this update. Every rank must call this, once per update.

        Args:
            often: reduces from one call to the next, whatever the interval: what follows may be slower than an update.
        """
        if self._world.size == 1:
            saved = self._saving is not None and self._saving.is_done
            return _as_agreed(self._drain(), saved=saved) if saved or any(self._requested) else _NOTHING
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
        """Returns what was asked for up to this moment, on any rank. Waits for all ranks, which must call this."""
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
        """Waits for what is still under way, so that no collective is left over. Every rank must call this."""
        self._read()
        self._left = 2

    def clear(self) -> None:
        """Drops what was asked for: the run that it was meant for has ended."""
        self._requested = [0, 0, 0]
        self.stop_reason = ""
        # Of a run that an error ended: nobody may read an answer to what that run was asked, or meet out of step.
        self._in_flight = None
        self._interval, self._left = 1, 2

    def _drain(self) -> list[int]:
        # A stop stays asked for, so that no race with a signal handler can lose it.
        taken, self._requested = self._requested, [0, 0, self._requested[2]]
        return taken

    def _begin(self) -> None:
        now_s = time.perf_counter()
        update_us = min(int((now_s - self._began_s) / max(self._updates, 1) * 1e6), _LONGEST_US)
        self._began_s, self._updates = now_s, 0
        # The longest update of any rank travels along: from it all ranks derive the same interval.
        # A save that is begun while the reduction is under way must not be taken for one that has ended.
        self._covers_save = self._saving is not None
        is_busy = self._saving is not None and not self._saving.is_done
        values = torch.tensor([*self._drain(), int(is_busy), update_us], dtype=torch.int32)
        self._in_flight = values, self._world.all_reduce_max_async(values)

    def _read(self) -> Agreed:
        if self._in_flight is None:
            return _NOTHING
        tensor, work = self._in_flight
        self._in_flight = None
        work.wait()
        *values, is_busy, update_us = tensor.tolist()
        self._interval = max(1, min(_MOST_UPDATES, int(WITHIN_S * 1e6 / max(update_us, 1))))
        saved = self._covers_save and not is_busy
        return _as_agreed(values, saved=saved) if saved or any(values) else _NOTHING


def _as_agreed(values: list[int], *, saved: bool) -> Agreed:
    evaluate, save, stop = values
    status = _STATUSES[stop - 1] if stop else None
    return Agreed(evaluate=bool(evaluate), save=bool(save), at_once=save == 2, stop=status, saved=saved)
