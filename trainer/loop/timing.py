"""The current phase of a rank, since when, and how long phases usually take; read by the hang watchdog and records."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol, get_args

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


_DEVICE_PHASES: tuple[Phase, ...] = ("reading data", *UPDATE_PHASES)

_MEASURED_EVERY = 10
"""The device's time in forward, backward and optimizer is measured in one of so many updates, first the second."""

_MOST_MARKS = 1024
"""Marks kept before those that the device has passed are evaluated."""


class DeviceEvent(Protocol):
    """A mark in the work of a device, such as `torch.cuda.Event(enable_timing=True)`."""

    def record(self) -> None:
        """Queue the mark behind the work of the current stream."""

    def query(self) -> bool:
        """Return whether the device has passed the mark."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Return the milliseconds between two marks that the device has passed."""


class DeviceTimes:
    """Times of the phases of updates on a device that works behind the host. It never waits for the device.

    The device's time in "reading data" is the time for which it has nothing to do, as the host waits for a batch.

    Args:
        new_event: makes an event of the device.
    """

    def __init__(self, new_event: Callable[[], DeviceEvent]) -> None:
        self._new_event = new_event
        self._free: list[DeviceEvent] = []
        self._marks: list[tuple[Phase | None, DeviceEvent]] = []
        self._phase: Phase | None = None
        self._updates = 0
        self._measures_update = False
        self._seconds: dict[Phase, float] = dict.fromkeys(_DEVICE_PHASES, 0.0)

    def enter(self, phase: Phase) -> None:
        """Mark the start of a phase: of every read, and of all phases in some updates."""
        after_read = self._phase == "reading data"
        if phase == "forward" and after_read:
            self._measures_update = self._updates % _MEASURED_EVERY == 1
            self._updates += 1
        is_measured = self._measures_update and phase in UPDATE_PHASES
        if is_measured or phase == "reading data" or after_read or self._measures_update:
            if len(self._marks) >= _MOST_MARKS:
                self._evaluate()
            event = self._free.pop() if self._free else self._new_event()
            event.record()
            self._marks.append((phase if is_measured or phase == "reading data" else None, event))
        self._measures_update = is_measured
        self._phase = phase

    def take(self) -> dict[Phase, float]:
        """Return the seconds of the device by phase since the last call, as far as it has come."""
        self._evaluate()
        seconds, self._seconds = self._seconds, dict.fromkeys(_DEVICE_PHASES, 0.0)
        return seconds

    def _evaluate(self) -> None:
        """Add up the times between marks that the device has passed, and use their events again."""
        passed = 0
        for (phase, event), (_, following) in itertools.pairwise(self._marks):
            if not following.query():
                break
            if phase is not None:
                self._seconds[phase] += event.elapsed_time(following) / 1000
            self._free.append(event)
            passed += 1
        del self._marks[:passed]


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
        self._device_times: DeviceTimes | None = None
        # As of the last division: later times of these phases are still the host's.
        self._divided_s = dict.fromkeys(_DEVICE_PHASES, 0.0)

    def measure_device(self, device_times: DeviceTimes) -> None:
        """Count the reads and updates by the time of a device that works behind the host; see `divide_as_device`."""
        self._device_times = device_times

    def divide_as_device(self) -> None:
        """Divide the time of reads and updates since the last call as the device spent it, once it has caught up.

        While the device still works, waiting for a batch is no loss: only the time for which it had nothing to do
        counts as "reading data". The rest is divided among forward, backward and optimizer as in the updates measured.
        """
        if self._device_times is None or not self.updates:
            return
        device_s = self._device_times.take()
        host_s = {phase: self._spent_s[phase] - self._divided_s[phase] for phase in _DEVICE_PHASES}
        idle_s = min(host_s["reading data"], device_s.pop("reading data"))
        busy_s, measured_s = sum(host_s.values()) - idle_s, sum(device_s.values())
        spent_s = {**self._spent_s, "reading data": self._divided_s["reading data"] + idle_s}
        if measured_s > 0:
            for phase, seconds in device_s.items():
                spent_s[phase] = self._divided_s[phase] + busy_s * seconds / measured_s
        else:
            spent_s["optimizer"] += host_s["reading data"] - idle_s
        self._spent_s = spent_s
        self._divided_s = {phase: spent_s[phase] for phase in _DEVICE_PHASES}

    def enter(self, phase: Phase) -> None:
        """Enter a phase, or restart the current one. Takes less than a microsecond."""
        now_s = time.monotonic()
        stay_s = now_s - self.since_s
        self._spent_s[self.phase] += stay_s
        if stay_s > self._longest_s[self.phase]:
            self._record_stay(stay_s)
        self.since_s = now_s
        self.phase = phase
        if self._device_times is not None:
            self._device_times.enter(phase)

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
            self._divided_s = {phase: self._spent_s[phase] for phase in _DEVICE_PHASES}
            if self._device_times is not None:
                self._device_times.take()

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
