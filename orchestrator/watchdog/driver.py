"""The driver's side of the watchdogs: reads the ranks' heartbeats, applies `policy.py`, and sends orders to workers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from headway.trainer.loop.timing import PHASES

from ..config.experiment import Experiment
from ..errors import StorageError
from ..storage.events import Event, EventWriter
from ..storage.folder import Folder
from .policy import HangTimeouts, Rank, Straggler, find_straggler
from .worker import ORDER, heartbeat_file, heartbeat_interval_s, stacks_file, watch_folder

# Of the timeout of collectives. Ranks that time out in one cannot say for which rank they waited.
_TIMEOUT_SHARE = 0.8


@dataclass
class _RankState:
    """The last heartbeat of a rank, and the time since."""

    beat: dict[str, Any]
    silent_s: float = 0.0


class HangMonitor:
    """Monitors the ranks of one start of a run, reports stragglers, and ends an attempt that hangs.

    Args:
        experiment: whose `retries.hang_timeout` applies.
        folder: the run's folder.
        events: receives "rank_late" and "rank_hung".
        clock: monotonic seconds.
    """

    def __init__(
        self,
        experiment: Experiment,
        folder: Folder,
        events: EventWriter,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._events, self._clock = watch_folder(folder), events, clock
        self._beat_s = heartbeat_interval_s(folder)
        self._timeouts = hang_timeouts_of(experiment, self._beat_s)
        self._attempt: int | None = None
        self._ranks: list[_RankState] = []
        self._polled_s = clock()
        self._orders = 0
        self._reported: tuple[Any, ...] | None = None

    def handle(self, event: Event) -> None:
        """Track the start and the end of attempts."""
        if event["event"] == "attempt_started" and self._timeouts is not None:
            self._attempt, self._reported = event["attempt"], None
            self._ranks = [_RankState({"beat": 0, **worker}) for worker in event["workers"]]
            self._polled_s = self._clock()
        elif event["event"] in ("group_failed", "attempt_ended"):
            self.end()

    def end(self) -> None:
        """Stop monitoring: the attempt has ended."""
        self._attempt = None

    def poll(self) -> None:
        """Read the heartbeats, if they are due, and act on them."""
        passed_s = self._clock() - self._polled_s
        if self._attempt is None or self._timeouts is None or passed_s < self._beat_s:
            return
        self._polled_s += passed_s
        # If this process was itself stopped or asleep, its pause must not count as the ranks' silence.
        self._read_heartbeats(min(passed_s, 2 * self._beat_s))
        straggler = find_straggler([_rank(state) for state in self._ranks], self._timeouts)
        if straggler is None:
            return
        if straggler.is_hung:
            self._end(straggler)
        elif (report := (straggler.ranks, straggler.step, straggler.phase)) != self._reported:
            self._reported = report
            self._order(straggler, end=False)
            self._emit("rank_late", straggler)

    def _read_heartbeats(self, passed_s: float) -> None:
        for state in self._ranks:
            beat = None
            with contextlib.suppress(StorageError, ValueError):
                beat = json.loads(self._folder.read(heartbeat_file(state.beat["rank"])) or "null")
            if beat and beat["attempt"] == self._attempt and beat["beat"] != state.beat["beat"]:
                state.beat, state.silent_s = beat, 0.0
            else:
                state.silent_s += passed_s

    def _end(self, straggler: Straggler) -> None:
        """End the attempt: workers exit on the order, and Ray ends one that cannot when it finds the others gone."""
        # Before the order, so that the reason is recorded once workers are gone.
        self._emit("rank_hung", straggler)
        self._order(straggler, end=True)
        if straggler.is_silent:
            # A single rank has no others whose end Ray could notice.
            self._kill_here(straggler.ranks)
        self._attempt = None

    def _order(self, straggler: Straggler, *, end: bool) -> None:
        self._orders += 1
        order = {"attempt": self._attempt, "number": self._orders, "end": end, "why": str(straggler)}
        self._folder.write(ORDER, json.dumps(order))

    def _kill_here(self, ranks: Iterable[int]) -> None:
        for beat in (self._ranks[rank].beat for rank in ranks):
            if beat["host"] == socket.gethostname():
                with contextlib.suppress(OSError):
                    os.kill(beat["pid"], signal.SIGKILL)

    def _emit(self, kind: str, straggler: Straggler) -> None:
        self._events.add(
            kind,
            attempt=self._attempt,
            ranks=straggler.ranks,
            phase=straggler.phase,
            step=straggler.step,
            for_s=round(straggler.for_s, 1),
            text=str(straggler),
            stacks=self._folder.path(stacks_file(self._attempt or 0, 0)).removesuffix("0.txt") + "*.txt",
        )


def hang_timeouts_of(experiment: Experiment, heartbeat_interval_s: float) -> HangTimeouts | None:
    """Return the timeouts of an experiment; None if hangs are not monitored."""
    wanted = experiment.retries.hang_timeout
    if wanted is None:
        return None
    return HangTimeouts(
        fixed_s=None if wanted == "auto" else wanted.amount,
        startup_s=_TIMEOUT_SHARE * experiment.config.parallel.timeout.amount,
        silent_after_s=max(HangTimeouts.silent_after_s, 4 * heartbeat_interval_s),
    )


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
