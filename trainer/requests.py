"""What somebody asks of a run while it trains, on any rank, agreed by all ranks at the same update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from .world import World

StopStatus = Literal["stopped", "time_limit", "interrupted"]
_STATUSES: tuple[StopStatus, ...] = ("stopped", "time_limit", "interrupted")


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks are to do now.

    Attributes:
        evaluate, save: somebody asked for it.
        stop: how the run is to be called that ends here, or None to go on.
    """

    evaluate: bool = False
    save: bool = False
    stop: StopStatus | None = None


_NOTHING = Agreed()


class Requests:
    """Collects requests from hooks, signal handlers and other threads, and lets all ranks agree on them.

    `agree` never makes the loop wait for another rank: it begins a tiny reduction after one update and reads it after
    the next, when it has long arrived. So a request takes effect one update after it was made, on every rank at once;
    after an evaluation and at the end of an epoch, where all ranks meet anyway, `agree_now` has it take effect there.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._wanted = [0, 0, 0]
        self._in_flight: tuple[torch.Tensor, Any] | None = None
        self.stop_reason = ""

    def evaluate(self) -> None:
        """Asks for an evaluation. Any rank may, from any thread."""
        self._wanted[0] = 1

    def save(self) -> None:
        """Asks for a checkpoint. Any rank may, from any thread."""
        self._wanted[1] = 1

    def stop(self, reason: str, status: StopStatus) -> None:
        """Asks for an orderly end. Any rank may, from any thread or signal handler; the first reason stays."""
        self.stop_reason = self.stop_reason or reason or "a request without a reason"
        self._wanted[2] = max(self._wanted[2], 1 + _STATUSES.index(status))

    def agree(self) -> Agreed:
        """Returns what all ranks are to do at this update. Every rank must call this, once per update."""
        if self._world.size == 1:
            if not any(self._wanted):
                return _NOTHING
            values, self._wanted = self._wanted, [0, 0, self._wanted[2]]
        else:
            values = self._read()
            flags = torch.tensor(self._wanted, dtype=torch.int32)
            self._in_flight = flags, self._world.start_maximum(flags)
            # A stop stays asked for, so that no race with a signal handler can lose it.
            self._wanted = [0, 0, self._wanted[2]]
        if not any(values):
            return _NOTHING
        return Agreed(
            evaluate=bool(values[0]), save=bool(values[1]), stop=_STATUSES[values[2] - 1] if values[2] else None
        )

    def agree_now(self) -> Agreed:
        """Returns what was asked for up to this moment, on any rank. Waits for all ranks, which must call this."""
        earlier, now = self.agree(), self.agree()
        return Agreed(evaluate=earlier.evaluate or now.evaluate, save=earlier.save or now.save, stop=now.stop)

    def close(self) -> None:
        """Waits for what is still under way, so that no collective is left over. Every rank must call this."""
        self._read()

    def forget(self) -> None:
        """Drops what was asked for: the run that it was meant for has ended."""
        self._wanted = [0, 0, 0]
        self.stop_reason = ""

    def _read(self) -> list[int]:
        if self._in_flight is None:
            return [0, 0, 0]
        flags, work = self._in_flight
        self._in_flight = None
        work.wait()
        values: list[int] = flags.tolist()
        return values
