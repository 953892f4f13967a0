"""What a rank is doing, since when, and how long that usually takes: written by the loop, read by who watches it."""

from __future__ import annotations

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
"""In the order in which a rank goes through them from one update to the next; logging is "between updates"."""

PHASES: tuple[Phase, ...] = get_args(Phase)

FIRST_UPDATE = "first update"
"""What `Activity.spent_s` calls the steps of the first update of a process, in which torch compiles and allocates."""

UPDATE_PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer")
"""The phases in which an update is made."""

_NOT_USUAL = 2
"""The first stays of an attempt in a phase compile, allocate and open files."""


class Activity:
    """Where one rank is. Only the training thread writes; any thread may read.

    Attributes:
        phase: what it does.
        since_s: when it began to, by `time.monotonic`.
        updates: made in this process, skipped ones too.
        batches: micro-batches begun of the update in hand, or of the evaluations after it.

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
        self._stays = dict.fromkeys(PHASES, 0)
        self._longest_s = dict.fromkeys(PHASES, -1.0)
        self._began_s = self.since_s
        self._spent_s: dict[str, float] = dict.fromkeys((*PHASES, FIRST_UPDATE), 0.0)

    def enter(self, phase: Phase) -> None:
        """Goes over to a phase, or begins the same one again. Costs less than a microsecond."""
        now_s = time.monotonic()
        stay_s = now_s - self.since_s
        self._spent_s[self.phase] += stay_s
        if stay_s > self._longest_s[self.phase]:
            self._record_stay(stay_s)
        self.since_s = now_s
        self.phase = phase

    def begin_batch(self, phase: Phase) -> None:
        """Enters a phase with the next micro-batch."""
        self.batches += 1
        self.enter(phase)

    def end_update(self) -> None:
        """Counts an update, and leaves it."""
        self.updates += 1
        self.batches = 0
        self.enter("between updates")
        if self.updates == 1:
            _book_as_first_update(self._spent_s)

    def spent_s(self) -> dict[str, float]:
        """Seconds since the beginning, by phase, which add up to all of them; the first update's are apart."""
        # In this order: whatever the training thread does in between, no second is lost or counted twice.
        phase, spent_s = self.phase, dict(self._spent_s)
        spent_s[phase] = 0.0
        spent_s[phase] = max(0.0, time.monotonic() - self._began_s - sum(spent_s.values()))
        if not self.updates:
            _book_as_first_update(spent_s)
        return spent_s

    def usual_s(self, phase: Phase) -> float | None:
        """How long a stay in a phase has taken at most, leaving out the first two; None before there was another."""
        return self._longest_s[phase] if self._stays[phase] > _NOT_USUAL else None

    def _record_stay(self, stay_s: float) -> None:
        """Counts a stay that may be the longest of its phase, as every one of the first is."""
        self._stays[self.phase] += 1
        if self._stays[self.phase] > _NOT_USUAL:
            self._longest_s[self.phase] = stay_s


def _book_as_first_update(spent_s: dict[str, float]) -> None:
    """Makes all updates so far the first one."""
    for phase in UPDATE_PHASES:
        spent_s[FIRST_UPDATE] += spent_s[phase]
        spent_s[phase] = 0.0


class SetupTimes(dict[str, float]):
    """Seconds by phase, in the order in which they end.

    `configure` builds the models on the meta device; `parallelise` checks that the ranks agree, shards and replicates;
    `initialise` draws the weights; `open_data`, `optimizers` and `restore` are what they say. `first_batch` is the wait
    for the first batch of the attempt, and `first_update` the update of it, in which torch compiles.

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
        """Adds to a phase what happens inside."""
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self[name] = self.get(name, 0.0) + time.perf_counter() - began_s
