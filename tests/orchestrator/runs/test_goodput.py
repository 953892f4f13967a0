"""Every second of a run belongs to one class, and the classes add up to the wall time."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, strategies as st

from headway.orchestrator.runs.goodput import CLASSES, GoodputReport, goodput_report
from headway.orchestrator.storage.events import Event
from headway.orchestrator.train.time_spent import time_spent
from headway.trainer.loop.timing import PHASES, Activity

STEP_S = 0.5


@dataclass
class Script:
    """Writer of the events of a run that also keeps the expected account."""

    now: float = 1000.0
    events: list[Event] = field(default_factory=list)
    truth: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0.0))
    attempt: int = 0
    furthest: int = 0
    setting_up: str = "starting"
    seconds: dict[str, float] = field(default_factory=dict)
    step: int = 0
    updates: int = 0

    def add(self, kind: str, **details: Any) -> None:
        self.events.append({"time": self.now, "event": kind, **details})

    def let_pass(self, seconds: float, name: str) -> None:
        self.now += seconds
        self.truth[name] += seconds

    def spend(self, seconds: float, phase: str, name: str) -> None:
        self.let_pass(seconds, name)
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def mark(self, phase: str = "between updates") -> dict[str, Any]:
        return {
            "attempt": self.attempt, "at": self.now, "step": self.step, "updates": self.updates, "phase": phase,
            "seconds": dict(self.seconds),
        }  # fmt: skip

    def start(self, seconds: float) -> None:
        since, self.setting_up = self.now, "starting"
        self.let_pass(seconds, "starting")
        self.add("driver_started", since=since)

    def come_up(self, *, waits_s: float, imports_s: float, spare: bool, at_step: int) -> None:
        """Start a worker group: the time from its request to its training."""
        starting = self.setting_up
        importing = "importing" if starting == "starting" else "restart"
        since = self.now
        if waits_s:
            self.now += 0.75 * waits_s
            self.add("waiting_for_machines", since=since)
            self.now += 0.25 * waits_s
            self.truth["waiting for machines"] += waits_s
        began = self.now
        if spare:
            began = since - 100.0
        else:
            self.let_pass(imports_s, importing)
        entered = self.now
        self.let_pass(0.25, starting)
        self.attempt += 1
        self.add("attempt_started", attempt=self.attempt, workers=[{"began": began, "entered": entered}])
        self.let_pass(0.5, importing)
        self.seconds, self.step, self.updates = {}, 0, 0
        self.spend(1.0, "setting up", starting)
        self.step = at_step
        self.add("training", step=at_step)
        self.setting_up = "restart"

    def train(self, steps: int, *, saves: bool, first_s: float) -> None:
        """Train updates of half a second with data and hooks, then evaluate and save."""
        for _ in range(steps):
            counts = "compute" if self.step >= self.furthest else "lost work done again"
            hooks = "hooks and logging" if counts == "compute" else counts
            self.spend(0.1, "reading data", "data wait")
            if not self.updates:
                self.spend(first_s, "first update", "compiling")
                self.seconds["first update"] += STEP_S
                self.let_pass(STEP_S, counts)
            else:
                self.spend(STEP_S / 2, "forward", counts)
                self.spend(STEP_S / 2, "optimizer", counts)
            self.step += 1
            self.updates += 1
            self.spend(0.05, "between updates", hooks)
        if saves:
            self.spend(0.7, "evaluation", "evaluation")
            self.spend(0.3, "saving", "checkpoint stall")
            self.add("checkpoint_saved", step=self.step, spent=self.mark())

    def fail(self, noticed_s: float) -> None:
        """Lose the group; its last heartbeat is found."""
        heard = self.mark()
        self.furthest = max(self.furthest, self.step)
        self.let_pass(noticed_s, "restart")
        self.add("group_failed", attempt=self.attempt)
        self.add("last_heard", spent=heard)


def agrees(account: GoodputReport, script: Script) -> None:
    assert account.seconds == pytest.approx(script.truth, abs=1e-6)
    assert sum(account.seconds.values()) == pytest.approx(account.wall_s, abs=1e-6)
    assert all(seconds >= 0 for seconds in account.seconds.values())


ATTEMPT = st.tuples(
    st.sampled_from([0.0, 8.0]),  # waits
    st.sampled_from([0.0, 2.0]),  # imports
    st.booleans(),  # from a spare
    st.lists(st.integers(2, 6), min_size=0, max_size=3),  # updates from save to save
    st.integers(0, 5),  # updates that are lost after them
    st.booleans(),  # the driver dies as well
)


@given(st.lists(ATTEMPT, min_size=1, max_size=5))
def test_the_classes_are_what_happened_and_close_to_the_wall_time(attempts: list[Any]) -> None:
    script, saved, is_up, not_running_s, again = Script(), 0, False, 0.0, 0
    for number, (waits_s, imports_s, spare, saves, lost, dies) in enumerate(attempts):
        if not is_up:
            script.start(3.0)
            is_up = True
        script.come_up(waits_s=waits_s, imports_s=imports_s, spare=spare, at_step=saved)
        # Updates done again come in one piece with others between two marks: of equal length, as here, that is exact.
        if sum(saves) + lost < 2:
            saves = [2]
        for steps in saves:
            script.train(steps, saves=True, first_s=4.0)
            saved = script.step
        script.train(lost, saves=False, first_s=4.0)
        again += max(0, min(script.furthest, script.step) - (saved - sum(saves)))
        if number == len(attempts) - 1:
            break
        if dies:
            heard = script.mark()
            script.furthest = max(script.furthest, script.step)
            script.events.append({"time": script.now, "event": "last_heard", "spent": heard})
            script.now += 50.0
            not_running_s += 50.0
            is_up = False
        else:
            script.fail(0.4)
    script.add("last_heard", spent=script.mark())
    script.let_pass(2.0, "ending")
    script.add("driver_ended")
    account = goodput_report(script.events)
    agrees(account, script)
    assert account.wall_s == pytest.approx(sum(script.truth.values()))
    assert account.not_running_s == pytest.approx(not_running_s)
    assert account.steps_again == again
    assert account.attempts == len(attempts)
    assert account.goodput == pytest.approx(script.truth["compute"] / account.wall_s)


def test_a_hang_is_all_the_time_until_somebody_ended_it() -> None:
    """With heartbeats until the end or without: the time of a hang is not work."""
    for is_silent in (False, True):
        script = Script()
        script.start(1.0)
        script.come_up(waits_s=0.0, imports_s=1.0, spare=False, at_step=0)
        script.train(4, saves=False, first_s=1.0)
        if is_silent:
            heard = script.mark("backward")
            script.let_pass(10.0, "hang")
        else:
            script.spend(10.0, "backward", "hang")
            heard = script.mark("backward")
        script.add("rank_hung", attempt=1, for_s=10.0)
        script.let_pass(1.0, "restart")
        script.add("group_failed", attempt=1)
        script.add("last_heard", spent=heard)
        script.come_up(waits_s=0.0, imports_s=1.0, spare=False, at_step=4)
        script.add("last_heard", spent=script.mark())
        script.add("driver_ended")
        account = goodput_report(script.events)
        assert account.seconds["hang"] == pytest.approx(10.0)
        agrees(account, script)


@pytest.mark.parametrize("first_marked", [False, True], ids=["before its first mark", "between two marks"])
def test_the_time_for_which_a_machine_slept_is_no_time_of_the_run(first_marked: bool) -> None:
    """The monotonic clock stops during sleep, the wall clock does not."""
    script = Script()
    script.start(3.0)
    script.come_up(waits_s=0.0, imports_s=2.0, spare=False, at_step=0)
    # Before the first mark, all that is known is that the trainer was made before it trained.
    setting_up_s = 0.0 if first_marked else script.seconds["setting up"]
    if first_marked:
        script.train(3, saves=True, first_s=4.0)
    script.now += 8 * 3600.0
    script.train(20, saves=True, first_s=4.0)
    script.add("driver_ended")
    account = goodput_report(script.events)
    assert account.not_running_s == pytest.approx(8 * 3600.0 - setting_up_s)
    script.truth["importing"] += setting_up_s
    agrees(account, script)
    assert not account.advice().startswith("importing")


def test_what_two_clocks_differ_by_is_no_sleep() -> None:
    script = Script()
    script.start(3.0)
    script.come_up(waits_s=0.0, imports_s=2.0, spare=False, at_step=0)
    script.train(3, saves=True, first_s=4.0)
    script.now += 0.4
    script.train(20, saves=True, first_s=4.0)
    script.add("driver_ended")
    account = goodput_report(script.events)
    assert account.not_running_s == 0
    assert account.wall_s == pytest.approx(sum(script.truth.values()) + 0.4)
    assert sum(account.seconds.values()) == pytest.approx(account.wall_s)


def test_a_clock_that_is_set_back_makes_the_classes_smaller_and_not_more_than_the_wall_time() -> None:
    script = Script()
    script.start(3.0)
    script.come_up(waits_s=0.0, imports_s=2.0, spare=False, at_step=0)
    script.train(150, saves=False, first_s=4.0)
    script.now -= 50.0
    script.train(10, saves=True, first_s=4.0)
    script.add("driver_ended")
    account = goodput_report(script.events)
    assert sum(account.seconds.values()) == pytest.approx(account.wall_s)
    assert account.seconds["compute"] / account.seconds["data wait"] == pytest.approx(STEP_S / 0.1, rel=0.01)
    assert 0.5 < account.goodput < 1


def test_a_run_that_goes_on_is_accounted_for_until_now() -> None:
    script = Script()
    script.start(1.0)
    assert goodput_report(script.events, until=script.now + 4).seconds["starting"] == 5.0
    script.add("waiting_for_machines", since=script.now)
    account = goodput_report(script.events, until=script.now + 30)
    assert (account.seconds["starting"], account.seconds["waiting for machines"]) == (1.0, 30.0)
    assert account.advice().startswith("waiting for machines is 97 % of the time: use fewer workers")


def test_what_is_not_known_makes_no_ledger() -> None:
    """No events, events of an earlier version, and a start without training."""
    assert goodput_report([]).wall_s == 0
    assert goodput_report([]).goodput == 0
    old = [{"time": 1.0, "event": "driver_started"}, {"time": 5.0, "event": "attempt_started", "attempt": 1}]
    assert goodput_report(old).seconds["starting"] == 4.0


def test_the_first_thing_worth_fixing_is_the_largest_that_is_no_work() -> None:
    seconds = dict.fromkeys(CLASSES, 0.0) | {"compute": 60.0, "data wait": 31.0, "evaluation": 9.0}
    assert (
        GoodputReport(seconds=seconds, wall_s=100.0)
        .advice()
        .startswith("data wait is 31 % of the time: use more loader")
    )
    seconds |= {"compute": 97.0, "data wait": 3.0, "evaluation": 0.0}
    assert GoodputReport(seconds=seconds, wall_s=100.0).advice().startswith("nothing")


def test_a_rank_says_what_it_has_spent_its_time_on_and_leaves_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    activity = Activity()
    for update in range(3):
        for phase in ("reading data", "forward", "backward", "optimizer"):
            activity.enter(phase)  # type: ignore[arg-type]
            now_s += 20 if update == 0 and phase == "forward" else 2
        if update == 0:
            assert time_spent(activity, attempt=1, step=0)["phase"] == "first update"
            assert activity.spent_s()["forward"] == 0
        activity.end_update()
    now_s += 1
    said = time_spent(activity, attempt=1, step=3)
    assert (said["step"], said["updates"], said["phase"]) == (3, 3, "between updates")
    seconds = activity.spent_s()
    assert sum(seconds.values()) == pytest.approx(now_s - 100)
    assert seconds["first update"] == 24  # without reading data
    assert seconds["forward"] == 4
    assert set(seconds) == {*PHASES, "first update"}
