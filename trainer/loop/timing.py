"""The current phase of a rank, since when, and how long phases usually take; read by the hang watchdog and records."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

Phase = Literal[
    "setting up",
    "between updates",
    "saving",
    "around an evaluation",
    "reading validation data",
    "evaluation",
    "reading data",
    "forward",
    "backward",
    "optimizer",
    "ended",
]
"""Phases, in the order in which a rank passes them from one update to the next; logging is "between updates"."""

PHASES: tuple[Phase, ...] = get_args(Phase)

FIRST_UPDATE = "first update"
"""Key in `Activity.spent_s` of the first update of a process, in which torch compiles and allocates."""

UPDATE_PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer")
"""The phases of an update."""

_NOT_USUAL = 2
"""Number of first stays in a phase that do not count, since they compile, allocate and open files."""


class Activity:
    """The phase of one rank. Only the training thread writes; any thread may read.

    Attributes:
        phase: the current phase.
        since_s: its start, by `time.monotonic`.
        updates: made in this process, including skipped ones.
        batches: micro-batches started in the current update, or in the evaluations after it.
        thread: identifier of the training thread, set when it begins a batch.

    Example:
        >>> activity = Activity()
        >>> activity.enter("forward")
        >>> activity.phase, activity.usual_s("forward")
        ('forward', None)
    """

    def __init__(self) -> None:
        self.phase: Phase = "setting up"
        self.since_s = time.monotonic()
        self.updates = self.batches = 0
        self.thread = threading.get_ident()
        self._stays = dict.fromkeys(PHASES, 0)
        self._longest_s = dict.fromkeys(PHASES, -1.0)
        self._began_s = self.since_s
        self._spent_s: dict[str, float] = dict.fromkeys((*PHASES, FIRST_UPDATE), 0.0)

    def enter(self, phase: Phase) -> None:
        """Enter a phase, or restart the current one. Takes less than a microsecond."""
        now_s = time.monotonic()
        stay_s = now_s - self.since_s
        self._spent_s[self.phase] += stay_s
        if stay_s > self._longest_s[self.phase]:
            self._record_stay(stay_s)
        self.since_s = now_s
        self.phase = phase

    def begin_batch(self, phase: Phase) -> None:
        """Enter a phase with the next micro-batch."""
        self.batches += 1
        self.thread = threading.get_ident()
        self.enter(phase)

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Enter a phase, and "between updates" at the end; after an error it stays, as the phase of that error."""
        self.enter(phase)
        yield
        self.enter("between updates")

    def end_update(self) -> None:
        """Count an update, and enter "between updates"."""
        self.updates += 1
        self.batches = 0
        self.enter("between updates")
        if self.updates == 1:
            _book_as_first_update(self._spent_s)

    def spent_s(self) -> dict[str, float]:
        """Return the seconds since the start by phase, with the first update under `FIRST_UPDATE`; they add up."""
        # This order loses and repeats no time, even if the training thread enters a phase in between.
        phase, spent_s = self.phase, dict(self._spent_s)
        spent_s[phase] = 0.0
        spent_s[phase] = max(0.0, time.monotonic() - self._began_s - sum(spent_s.values()))
        if not self.updates:
            _book_as_first_update(spent_s)
        return spent_s

    def usual_s(self, phase: Phase) -> float | None:
        """Return the longest stay in a phase so far, without the first two; None if there was no other."""
        return self._longest_s[phase] if self._stays[phase] > _NOT_USUAL else None

    def _record_stay(self, stay_s: float) -> None:
        """Count a stay that may be the longest of its phase; any of the first stays may."""
        self._stays[self.phase] += 1
        if self._stays[self.phase] > _NOT_USUAL:
            self._longest_s[self.phase] = stay_s


def _book_as_first_update(spent_s: dict[str, float]) -> None:
    """Move the seconds of all updates so far to the first update."""
    for phase in UPDATE_PHASES:
        spent_s[FIRST_UPDATE] += spent_s[phase]
        spent_s[phase] = 0.0


class SetupTimes(dict[str, float]):
    """Seconds by phase, in the order in which they end.

    `compile_cache` loads what an earlier attempt has compiled; `configure` builds the models on the meta device;
    `parallelise` checks that the ranks agree, shards and replicates; `initialise` draws the weights; then `open_data`,
    `optimizers` and `restore`. `first_batch` is the wait for the first batch of the attempt, and `first_update` its
    update, in which torch compiles.

    Example:
        >>> from headway.trainer.loop.timing import SetupTimes
        >>> times = SetupTimes()
        >>> with times.phase("open_data"):
        ...     pass
        >>> list(times)
        ['open_data']
    """

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside the context to a phase."""
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self[name] = self.get(name, 0.0) + time.perf_counter() - began_s
