"""The driver's side of the watchdogs: finds ranks that hang, by mailbox or files, and sends orders to workers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..config.experiment import Experiment
from ..errors import StorageError
from ..storage.events import Event, EventWriter
from ..storage.folder import Folder
from .mailbox import DriverMailbox, MailboxLost
from .policy import HangTimeouts, Straggler
from .ranks import RankStates
from .worker import ORDER, file_interval_s, heartbeat_file, heartbeat_interval_s, stacks_file, watch_folder

# Of the timeout of collectives. Ranks that time out in one cannot say for which rank they waited.
_TIMEOUT_SHARE = 0.8


class HangMonitor:
    """Monitors the ranks of one start of a run, reports stragglers, and ends an attempt that hangs.

    Args:
        experiment: whose `retries.hang_timeout` applies.
        folder: the run's folder.
        events: receives "rank_late" and "rank_hung".
        mailbox: to which the ranks send their heartbeats; None if they write files only.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        experiment: Experiment,
        folder: Folder,
        events: EventWriter,
        *,
        mailbox: DriverMailbox | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._events, self._mailbox, self._clock = watch_folder(folder), events, mailbox, clock
        self._file_s = self._beat_s = file_interval_s(folder)
        self._timeouts = hang_timeouts_of(experiment, self._file_s)
        self._attempt: int | None = None
        self._workers: dict[int, Mapping[str, Any]] = {}
        # According to their files.
        self._ranks: RankStates | None = None
        self._relayed: dict[int, int] = {}
        self._polled_s = clock()
        self._orders = 0
        self._reported: tuple[Any, ...] | None = None

    def handle(self, event: Event) -> None:
        """Track the start and the end of attempts."""
        if event["event"] == "attempt_started" and self._timeouts is not None:
            self._attempt, self._reported = event["attempt"], None
            self._workers = {worker["rank"]: worker for worker in event["workers"]}
            self._ranks, self._relayed = None, {}
            self._beat_s = self._file_s
            if self._mailbox is not None:
                self._beat_s = heartbeat_interval_s(len(self._workers))
                # A rank that cannot reach the mailbox is heard through its file.
                silent_after_s = max(HangTimeouts.silent_after_s, 4 * self._beat_s, 2.5 * self._file_s)
                timeouts = replace(self._timeouts, silent_after_s=silent_after_s)
                self._mailbox.start(event["attempt"], event["workers"], timeouts)
            self._polled_s = self._clock()
        elif event["event"] in ("group_failed", "attempt_ended"):
            self.end()

    def end(self) -> None:
        """Stop monitoring: the attempt has ended."""
        self._attempt = None

    def poll(self) -> None:
        """Look for a straggler, if it is time, and act on it."""
        passed_s = self._clock() - self._polled_s
        if self._attempt is None or self._timeouts is None or passed_s < self._beat_s:
            return
        self._polled_s += passed_s
        straggler = self._find(passed_s)
        if straggler is None:
            return
        if straggler.is_hung:
            self._end(straggler)
        elif (report := (straggler.ranks, straggler.step, straggler.phase)) != self._reported:
            self._reported = report
            self._order(straggler, end=False)
            self._emit("rank_late", straggler)

    def _find(self, passed_s: float) -> Straggler | None:
        # If this process was itself stopped or asleep, its pause must not count as the ranks' silence.
        most_s = 2 * self._beat_s
        if self._mailbox is not None:
            try:
                straggler = self._mailbox.find(passed_s, most_s=most_s)
            except MailboxLost:
                self._mailbox, self._beat_s = None, self._file_s
                return None
            return None if straggler is None or (straggler.is_silent and self._relay(straggler.ranks)) else straggler
        assert self._attempt is not None
        assert self._timeouts is not None
        if self._ranks is None:
            self._ranks = RankStates(self._attempt, list(self._workers.values()), self._timeouts)
        for beat in self._read_heartbeats(self._workers):
            self._ranks.receive(beat)
        return self._ranks.find(min(passed_s, most_s))

    def _relay(self, ranks: Iterable[int]) -> bool:
        """Pass on the heartbeats of ranks that reach their files but not the mailbox; returns whether there are any."""
        assert self._mailbox is not None
        fresh = [
            beat for beat in self._read_heartbeats(ranks)
            if beat["attempt"] == self._attempt and beat["beat"] > self._relayed.get(beat["rank"], 0)
        ]  # fmt: skip
        for beat in fresh:
            self._relayed[beat["rank"]] = beat["beat"]
            self._mailbox.relay(beat)
        return bool(fresh)

    def _read_heartbeats(self, ranks: Iterable[int]) -> list[dict[str, Any]]:
        def read(rank: int) -> dict[str, Any] | None:
            with contextlib.suppress(StorageError, ValueError):
                beat: dict[str, Any] | None = json.loads(self._folder.read(heartbeat_file(rank)) or "null")
                return beat
            return None

        return [beat for beat in self._folder.map(read, ranks) if beat]

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
        if self._mailbox is not None:
            self._mailbox.publish(order=order)
        self._folder.write(ORDER, json.dumps(order))

    def _kill_here(self, ranks: Iterable[int]) -> None:
        for worker in (self._workers[rank] for rank in ranks):
            if worker["host"] == socket.gethostname():
                with contextlib.suppress(OSError):
                    os.kill(worker["pid"], signal.SIGKILL)

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
