"""The last heartbeats of the ranks of one attempt, and who keeps the others waiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.trainer.loop.timing import PHASES

from .policy import HangTimeouts, Rank, Straggler, find_straggler


@dataclass
class _RankState:
    """The last heartbeat of a rank, and the time since, in seconds."""

    beat: Mapping[str, Any]
    silent_s: float = 0.0
    is_new: bool = False


class RankStates:
    """The ranks of one attempt. Keeps no clock: its owner says how much time has passed.

    Args:
        attempt: number of the attempt; heartbeats of another one are ignored.
        workers: of the event "attempt_started".
        timeouts: when a rank is late, and when it hangs.
    """

    def __init__(self, attempt: int, workers: Sequence[Mapping[str, Any]], timeouts: HangTimeouts) -> None:
        self._attempt, self._timeouts = attempt, timeouts
        self._states = {worker["rank"]: _RankState({"beat": 0, **worker}) for worker in workers}

    def receive(self, beat: Mapping[str, Any]) -> None:
        """Take a heartbeat, which may be the last one again, or an earlier one."""
        state = self._states.get(beat["rank"])
        if state is not None and beat["attempt"] == self._attempt and beat["beat"] > state.beat["beat"]:
            state.beat, state.is_new = beat, True

    def find(self, passed_s: float) -> Straggler | None:
        """Return the rank that has kept the others waiting for too long, or None.

        Args:
            passed_s: seconds since the last call.
        """
        for state in self._states.values():
            state.silent_s = 0.0 if state.is_new else state.silent_s + passed_s
            state.is_new = False
        return find_straggler([_rank(state) for state in self._states.values()], self._timeouts)


def _rank(state: _RankState) -> Rank:
    beat = state.beat
    return Rank(
        rank=beat["rank"],
        phase=beat["phase"] if beat.get("phase") in PHASES else "setting up",
        for_s=beat.get("for_s", 0.0) + state.silent_s,
        usual_s=beat.get("usual_s"),
        updates=beat.get("updates", 0),
        batches=beat.get("batches", 0),
        step=beat.get("step", 0),
        silent_s=state.silent_s,
    )
