"""The driver's side of the watchdogs: hears the ranks, has `policy.py` judge, and tells the workers what to do."""

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
from ..storage.events import Event, EventLog
from ..storage.folder import Folder
from .policy import Late, Patience, Rank, who_is_late
from .worker import ORDER, beat_s, heartbeat_of, stacks_of, watch_folder

_BEFORE_TIMEOUT = 0.8


@dataclass
class _Heard:
    """The last heartbeat of a rank, and for how long there has been no other."""

    beat: dict[str, Any]
    silent_s: float = 0.0


class Watch:
    """Listens to the ranks of one start of a run, and ends an attempt that hangs.

    Args:
        experiment: with the patience that it wants.
        folder: of the run.
        events: where to write who is late, and who hung.
        clock: seconds, from any beginning.
    """

    def __init__(
        self, experiment: Experiment, folder: Folder, events: EventLog, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder, self._events, self._clock = watch_folder(folder), events, clock
        self._beat_s = beat_s(folder)
        self._patience = patience_of(experiment, self._beat_s)
        self._attempt: int | None = None
        self._heard: list[_Heard] = []
        self._looked_s = clock()
        self._orders = 0
        self._told: tuple[Any, ...] | None = None

    def heed(self, event: Event) -> None:
        """Takes note of the beginning and the end of attempts."""
        if event["event"] == "attempt_started" and self._patience is not None:
            self._attempt, self._told = event["attempt"], None
            self._heard = [_Heard({"beat": 0, **worker}) for worker in event["workers"]]
            self._looked_s = self._clock()
        elif event["event"] in ("group_failed", "attempt_ended"):
            self.end()

    def end(self) -> None:
        """Takes note that the attempt has ended, whoever says so."""
        self._attempt = None

    def look(self) -> None:
        """Hears the ranks, if it is time, and acts."""
        passed_s = self._clock() - self._looked_s
        if self._attempt is None or self._patience is None or passed_s < self._beat_s:
            return
        self._looked_s += passed_s
        # Who was away himself, stopped or asleep, has no right to call others silent.
        self._hear(min(passed_s, 2 * self._beat_s))
        late = who_is_late([_rank(heard) for heard in self._heard], self._patience)
        if late is None:
            return
        if late.is_over:
            self._end(late)
        elif (told := (late.ranks, late.step, late.phase)) != self._told:
            self._told = told
            self._order(late, end=False)
            self._tell("rank_late", late)

    def _hear(self, passed_s: float) -> None:
        for heard in self._heard:
            beat = None
            with contextlib.suppress(StorageError, ValueError):
                beat = json.loads(self._folder.read(heartbeat_of(heard.beat["rank"])) or "null")
            if beat and beat["attempt"] == self._attempt and beat["beat"] != heard.beat["beat"]:
                heard.beat, heard.silent_s = beat, 0.0
            else:
                heard.silent_s += passed_s

    def _end(self, late: Late) -> None:
        """Ends the attempt. The workers end themselves, and Ray ends the one that cannot when it finds others gone."""
        # Before the order: who asks why the workers are gone finds the reason.
        self._tell("rank_hung", late)
        self._order(late, end=True)
        if late.is_silent:
            # It may be the only one.
            self._kill_here(late.ranks)
        self._attempt = None

    def _order(self, late: Late, *, end: bool) -> None:
        self._orders += 1
        order = {"attempt": self._attempt, "number": self._orders, "end": end, "why": str(late)}
        self._folder.write(ORDER, json.dumps(order))

    def _kill_here(self, ranks: Iterable[int]) -> None:
        for beat in (self._heard[rank].beat for rank in ranks):
            if beat["host"] == socket.gethostname():
                with contextlib.suppress(OSError):
                    os.kill(beat["pid"], signal.SIGKILL)

    def _tell(self, kind: str, late: Late) -> None:
        self._events.add(
            kind,
            attempt=self._attempt,
            ranks=late.ranks,
            phase=late.phase,
            step=late.step,
            for_s=round(late.for_s, 1),
            text=str(late),
            stacks=self._folder.path(stacks_of(self._attempt or 0, 0)).removesuffix("0.txt") + "*.txt",
        )


def patience_of(experiment: Experiment, beat_s: float) -> Patience | None:
    """Returns how long the ranks of an experiment may take; None if they may take for ever."""
    wanted = experiment.retries.hang_timeout
    if wanted is None:
        return None
    return Patience(
        fixed_s=None if wanted == "auto" else wanted.amount,
        # Before the ranks that wait give up: they cannot say for whom.
        first_s=_BEFORE_TIMEOUT * experiment.config.parallel.timeout.amount,
        silence_s=max(Patience.silence_s, 4 * beat_s),
    )


def _rank(heard: _Heard) -> Rank:
    beat = heard.beat
    return Rank(
        rank=beat["rank"],
        phase=beat["phase"] if beat.get("phase") in PHASES else "setting up",
        for_s=beat.get("for_s", 0.0) + heard.silent_s,
        usual_s=beat.get("usual_s"),
        updates=beat.get("updates", 0),
        batches=beat.get("batches", 0),
        step=beat.get("step", 0),
        silent_s=heard.silent_s,
    )
