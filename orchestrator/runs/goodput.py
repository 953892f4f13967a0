"""Goodput: the time of a run by class, over all its attempts and starts, from its events.

Times are those of the main rank: waiting for a slower rank counts as computing. A start is the lifetime of one driver.
Its wall time lasts from the call of `fit` to its last event, or to its last heartbeat if it died, without the time for
which the main rank's machine slept.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.trainer.loop.timing import FIRST_UPDATE, UPDATE_PHASES

from ..storage.events import Event, read_events
from ..train.elastic import RESIZING
from ..watchdog.worker import last_heartbeat_event
from .run import Run

ADVICE = {
    "compute": "",
    "waiting for machines": "use fewer workers (scaling.workers=1..8 starts with those that fit), or add machines",
    "starting": "negligible in a longer run; shorter on a Ray that is already running (RAY_ADDRESS)",
    "importing": "import less at the top of the trainer's file",
    "compiling": "negligible in a longer run; a restarted rank loads what is compiled (parallel.keep_compile_cache)",
    "data wait": "use more loader workers, a higher prefetch_factor, preprocessed data or faster storage",
    "checkpoint stall": "save less often (config.checkpoint.every), or to faster storage",
    "evaluation": "evaluate less often (config.evaluate_every), or on fewer batches (config.evaluate_batches)",
    "hooks and logging": "check the callbacks and on_step_end, and log less often (config.log_every)",
    "lost work done again": "save more often (config.checkpoint.every)",
    "hang": "the stacks in watch/ of the run's folder show where ranks hung; retries.hang_timeout shortens the wait",
    "restart": "find out what kills the workers; retries.spares keeps processes ready",
    "ending": "negligible in a longer run",
}
"""Advice for each class of time."""

CLASSES = tuple(ADVICE)

_WORTH_ADVICE = 0.05
# A shorter gap is not sleep, because recorded times are rounded and clocks drift.
_SLEEP_S = 1.0
_CLASS_OF: dict[str, str] = {
    "reading data": "data wait",
    "saving": "checkpoint stall",
    "around an evaluation": "evaluation",
    "evaluation": "evaluation",
    "reading validation data": "evaluation",
    "between updates": "hooks and logging",
    "ended": "ending",
    FIRST_UPDATE: "compiling",
    **dict.fromkeys(UPDATE_PHASES, "compute"),
}


@dataclass(frozen=True, kw_only=True)
class GoodputReport:
    """The time of a run by class.

    Attributes:
        seconds: seconds by class, for all `CLASSES` in order.
        wall_s: wall time of all starts together.
        not_running_s: time between starts, and while the main rank's machine slept; not part of `wall_s`.
        starts, attempts: number of starts of the driver, and of worker groups.
        steps_again: updates that were repeated.
    """

    seconds: dict[str, float]
    wall_s: float
    not_running_s: float = 0.0
    starts: int = 0
    attempts: int = 0
    steps_again: int = 0

    @property
    def goodput(self) -> float:
        """The share of wall time in updates that counted: forward, backward and optimizer."""
        return self.share("compute")

    def share(self, name: str) -> float:
        """Return a class's share of the wall time."""
        return self.seconds[name] / self.wall_s if self.wall_s > 0 else 0.0

    def advice(self) -> str:
        """Return one line of advice for the class that costs the most time."""
        worst = max((name for name in CLASSES if name != "compute"), key=self.share)
        if self.share(worst) < _WORTH_ADVICE:
            return "nothing: no other class has more than 5 % of the time"
        return f"{worst} is {100 * self.share(worst):.0f} % of the time: {ADVICE[worst]}"


def goodput_report(events: Sequence[Event], *, until: float | None = None) -> GoodputReport:
    """Return the time of a run by class, from its events.

    "lost work done again" is the time of updates up to the furthest one of an earlier attempt. The first update of an
    attempt compiles, allocates and connects the ranks: the time by which it exceeds a usual update, or all of it if
    there is no other, is "compiling". "restart" lasts from the end of an attempt until the next one of the same start
    trains.

    Args:
        events: events of the run, earliest first.
        until: for a running run, the current time in seconds since 1970; None: the last start ends with its events.
    """
    account = _Account(_marks(events))
    starts = _starts(events)
    for number, start in enumerate(starts):
        following = starts[number + 1].began if number + 1 < len(starts) else None
        account.account(start, before=following, until=until if following is None else None)
    return GoodputReport(
        seconds=account.seconds,
        wall_s=account.wall_s,
        not_running_s=account.not_running_s,
        starts=len(starts),
        attempts=len(account.attempts),
        steps_again=account.steps_again,
    )


@dataclass
class _Start:
    """The events of one start of the driver."""

    began: float
    events: list[Event]


def _starts(events: Sequence[Event]) -> list[_Start]:
    starts: list[_Start] = []
    for event in events:
        if event["event"] == "driver_started":
            starts.append(_Start(event["since"] if "since" in event else event["time"], [event]))
        elif starts and starts[-1].events[-1]["event"] != "driver_ended":
            starts[-1].events.append(event)
    return starts


def _marks(events: Sequence[Event]) -> dict[int, list[dict[str, Any]]]:
    """Return the main rank's reports of its time, by attempt, earliest first."""
    marks: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if (spent := event.get("spent")) is not None:
            marks.setdefault(spent["attempt"], []).append(spent)
    return {attempt: sorted(each, key=lambda mark: mark["at"]) for attempt, each in marks.items()}


@dataclass
class _Account:
    """The sum so far."""

    marks: dict[int, list[dict[str, Any]]]
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0.0))
    wall_s: float = 0.0
    not_running_s: float = 0.0
    steps_again: int = 0
    attempts: set[int] = field(default_factory=set)
    ended: float | None = None
    now: float = 0.0
    furthest: int = 0
    setting_up: str = "starting"
    _slept_s: float = 0.0

    def account(self, start: _Start, *, before: float | None, until: float | None) -> None:
        """Account for one start.

        Args:
            start: the next start.
            before: when the next start began, if there is one.
            until: the current time, if this start is running.
        """
        began = max(start.began, self.ended or start.began)
        if self.ended is not None:
            self.not_running_s += began - self.ended
        attempts = [event for event in start.events if event["event"] == "attempt_started"]
        times = [event["time"] for event in start.events if event["event"] != "last_heard"]
        times += [mark["at"] for each in attempts for mark in self.marks.get(each["attempt"], [])]
        ended = max([began, *times, *([until] if until is not None else [])])
        self.ended = ended if before is None else max(began, min(ended, before))
        self.now, is_over, slept_s = began, start.events[-1]["event"] == "driver_ended", 0.0
        bounds = [*(event["time"] for event in attempts), self.ended]
        for number, (attempt, next_at) in enumerate(zip(attempts, bounds[1:], strict=True)):
            events = [event for event in start.events if attempt["time"] <= event["time"] <= next_at]
            self._account_setup(attempt, start.events, is_first=number == 0)
            self._account_training(attempt, events)
            slept_s += self._slept_s
        tail = "ending" if is_over else _class_after(start.events)
        self._account_wait(start.events, self.ended, tail)
        self._pass(self.ended, tail)
        self.wall_s += self.ended - began - slept_s
        self.not_running_s += slept_s

    def _pass(self, until: float, name: str) -> None:
        """Assign the time from `now` to `until` to a class."""
        until = min(until, self.ended if self.ended is not None else until)
        if until > self.now:
            self.seconds[name] += until - self.now
            self.now = until

    def _account_wait(self, events: Sequence[Event], until: float, otherwise: str) -> None:
        waits = [
            event["since"]
            for event in events
            if event["event"] == "waiting_for_machines" and self.now <= event["time"] <= until
        ]
        if waits:
            self._pass(min(waits), otherwise)
            self._pass(until, "waiting for machines")

    def _account_setup(self, attempt: Event, events: Sequence[Event], *, is_first: bool) -> None:
        """Account for the time until the trainer of an attempt is created."""
        self.attempts.add(attempt["attempt"])
        starting, importing = ("starting", "importing") if is_first else ("restart", "restart")
        main = attempt["workers"][0] if attempt.get("workers") else {}
        entered: float = main["entered"] if "entered" in main else attempt["time"]
        began: float = min(main["began"], entered) if "began" in main else entered
        if began <= self.now:
            # A spare process started earlier, and has already imported everything.
            began = entered
        self._account_wait(events, began, starting)
        self._pass(began, starting)
        self._pass(entered, importing)
        self._pass(attempt["time"], starting)
        for mark in self.marks.get(attempt["attempt"], [])[:1]:
            made = mark["at"] - sum(mark["seconds"].values())
            # If the machine slept, `made` is too late; the trainer was created before training started.
            trained = [
                each["time"] for each in events if each["event"] == "training" and each["time"] >= attempt["time"]
            ]
            self._pass(min([made, *trained[:1]]), importing)
        self.setting_up = starting

    def _account_training(self, attempt: Event, events: Sequence[Event]) -> None:
        """Account for the time that the main rank reported, and for a hang after it."""
        hung = next((event for event in events if event["event"] == "rank_hung"), None)
        marks = self.marks.get(attempt["attempt"], [])
        self._slept_s = 0.0
        at_first = next((event["step"] for event in events if event["event"] == "training"), None)
        if marks:
            last = marks[-1]
            spent = self._fit_to_wall_time(last)
            if hung is not None:
                self._account_hang(spent, last, hung)
            for phase, seconds in spent.items():
                if phase in UPDATE_PHASES or phase in (FIRST_UPDATE, "between updates"):
                    continue
                self.seconds[_CLASS_OF.get(phase, self.setting_up)] += seconds
            self._account_updates(spent, marks, at_first)
            self.now = max(self.now, min(last["at"], self.ended or last["at"]))
        if hung is not None:
            self._pass(hung["time"], "hang")
        ends = ("checkpoint_saved", "rank_failed", "group_failed", "attempt_ended")
        reached = [event["step"] for event in events if event["event"] in ends and event.get("step") is not None]
        reached += [mark["step"] for mark in marks]
        self.furthest = max([self.furthest, at_first or 0, *reached])

    def _fit_to_wall_time(self, last: dict[str, Any]) -> dict[str, float]:
        """Return the main rank's times, fitted to the wall time between `now` and its report.

        Its monotonic clock stops while the machine sleeps, so excess wall time is sleep, unless it is within the drift
        of the clocks. Times that exceed the wall time are scaled down.
        """
        spent = {name: float(seconds) for name, seconds in last["seconds"].items()}
        room_s = max(0.0, min(last["at"], self.ended or last["at"]) - self.now)
        total_s = sum(spent.values())
        left_s = max(0.0, room_s - total_s)
        if left_s < _SLEEP_S:
            self.seconds[self.setting_up] += left_s
        else:
            self._slept_s = left_s
        return spent if total_s <= room_s else {name: each * room_s / total_s for name, each in spent.items()}

    def _account_hang(self, spent: dict[str, float], last: dict[str, Any], hung: Event) -> None:
        """Move the main rank's time in the phase of a hang to the class "hang"."""
        phase = last["phase"] if last["phase"] in spent else max(spent, key=spent.__getitem__)
        known_s = min(last["at"], hung["time"]) - (hung["time"] - hung["for_s"])
        hung_s = min(max(0.0, known_s), spent[phase])
        spent[phase] -= hung_s
        self.seconds["hang"] += hung_s

    def _account_updates(self, spent: dict[str, float], marks: Sequence[dict[str, Any]], at_first: int | None) -> None:
        """Account for an attempt's updates and the time between them, separating repeated updates."""
        updates, first_s = marks[-1]["updates"], spent.get(FIRST_UPDATE, 0.0)
        compute_s = sum(spent.get(phase, 0.0) for phase in UPDATE_PHASES)
        usual_s = min(first_s, compute_s / (updates - 1)) if updates > 1 else 0.0
        self.seconds["compiling"] += first_s - usual_s
        first = marks[0]["step"] if at_first is None else at_first
        repeated = _repeated_share(marks, first, self.furthest, usual_s)
        self.steps_again += repeated.steps
        work_s = {"compute": compute_s + usual_s, "hooks and logging": spent.get("between updates", 0.0)}
        for name, seconds in work_s.items():
            self.seconds["lost work done again"] += seconds * repeated.share
            self.seconds[name] += seconds * (1.0 - repeated.share)


def _class_after(events: Sequence[Event]) -> str:
    """Return the class of the time after the last event of a start without an end."""
    last = [event for event in events if event["event"] in ("attempt_started", "attempt_ended", "group_failed")][-1:]
    if not last:
        return "starting"
    return "restart" if last[0]["event"] == "group_failed" or last[0].get("status") == RESIZING else "ending"


@dataclass(frozen=True)
class _Repeated:
    share: float
    steps: int


def _repeated_share(marks: Sequence[dict[str, Any]], first: int, furthest: int, usual_s: float) -> _Repeated:
    """Return the share of an attempt's update time spent repeating earlier updates.

    Args:
        marks: the main rank's reports in the attempt.
        first: the step at which the attempt started.
        furthest: the furthest step of earlier attempts.
        usual_s: time of its first update without compilation.
    """
    points = [(first, 0.0)]
    for mark in marks:
        seconds = sum(each for name, each in mark["seconds"].items() if name in (*UPDATE_PHASES, "between updates"))
        seconds += usual_s if mark["updates"] else 0.0
        points.append((max(mark["step"], points[-1][0]), max(seconds, points[-1][1])))
    again_s, steps = 0.0, 0
    for (step, before_s), (next_step, after_s) in itertools.pairwise(points):
        repeated = max(0, min(next_step, furthest) - step)
        steps += repeated
        # Between two reports within one update, the whole interval belongs to it.
        share = repeated / (next_step - step) if next_step > step else float(step < furthest)
        again_s += share * (after_s - before_s)
    total_s = points[-1][1]
    return _Repeated(again_s / total_s if total_s > 0 else float(steps > 0), steps)


def goodput_report_of(run: Run) -> GoodputReport:
    """Return the time of a run by class; up to now if it is running."""
    # The main rank's last heartbeat is not in the events yet.
    last = [] if (heartbeat := last_heartbeat_event(run.folder)) is None else [heartbeat]
    return goodput_report([*read_events(run.folder), *last], until=time.time() if run.status == "running" else None)
