"""Parsing of durations, saving of counters, and schedules that are due at the same step on every rank."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given, strategies as st

from headway.trainer.errors import ConfigError
from headway.trainer.loop.progress import Duration, Progress, Schedule


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("500 steps", 500, "steps"),
        ("1 step", 1, "steps"),
        ("500", 500, "steps"),
        (500, 500, "steps"),
        (" 2 epochs ", 2, "epochs"),
        ("3ep", 3, "epochs"),
        ("90m", 5400, "seconds"),
        ("2h30m", 9000, "seconds"),
        ("2h 30min 5s", 9005, "seconds"),
        ("1d", 86400, "seconds"),
        ("5400s", 5400, "seconds"),
        ("1.5 hours", 5400, "seconds"),
        ("0.5S", 0.5, "seconds"),
        (Duration(3, "epochs"), 3, "epochs"),
    ],
)
def test_duration_reads_what_people_write(text: Any, amount: float, unit: str) -> None:
    duration = Duration.parse(text)
    assert (duration.amount, duration.unit) == (amount, unit)


@pytest.mark.parametrize(
    "text",
    [
        "2 months",
        "",
        "steps",
        "5 parsecs",
        "-5 steps",
        "1e3 steps",
        "5 steps 2h",
        "5 steps 5 steps",
        "2h30",
        "2 h of it",
        True,
    ]
    + [None, 5.5, "nan s", "5,000 steps"],
)
def test_duration_refuses_the_rest_and_says_what_would_do(text: Any) -> None:
    with pytest.raises(ConfigError, match='is not a duration: write "500 steps"'):
        Duration.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 steps", "must be > 0"),
        (-3, "must be > 0"),
        ("0s", "must be > 0"),
        ("1.5 epochs", "must be an integer, got 1.5"),
    ],
)
def test_duration_refuses_amounts_that_make_no_sense(text: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Duration.parse(text)


@pytest.mark.parametrize(("amount", "unit"), [(1, "weeks"), (float("inf"), "seconds"), (float("nan"), "seconds")])
def test_duration_that_is_made_directly_is_checked_too(amount: float, unit: Any) -> None:
    with pytest.raises(ConfigError):
        Duration(amount, unit)


@given(
    st.one_of(
        st.builds(Duration, st.integers(1, 10**12), st.sampled_from(["steps", "epochs"])),
        st.builds(Duration, st.floats(1e-9, 1e12), st.just("seconds")),
        st.builds(Duration, st.integers(1, 10**9), st.just("seconds")),
    )
)
def test_duration_as_text_and_back_is_itself(duration: Duration) -> None:
    assert Duration.parse(str(duration)) == duration
    assert pickle.loads(pickle.dumps(duration)) == duration


def test_duration_as_text_is_short() -> None:
    assert [str(Duration.parse(text)) for text in ("2h30m", "1 epoch", "12d", 5)] == [
        "9000s",
        "1 epochs",
        "1036800s",
        "5 steps",
    ]


def test_progress_comes_back_and_ignores_what_it_does_not_know() -> None:
    progress = Progress(step=7, epoch=2, step_in_epoch=1, offset=32, micro_batches=14, samples=99, elapsed_s=1.5)
    restored = Progress(evaluations=5)
    restored.load_state_dict({**progress.state_dict(), "of_a_later_version": 1})
    assert restored == Progress(**progress.state_dict())
    restored.load_state_dict({"step": 8})
    assert restored.step == 8
    assert restored.samples == 99


def test_schedule_by_steps_is_due_at_multiples_wherever_a_run_began() -> None:
    schedule = Schedule(Duration(4, "steps"))
    assert [step for step in range(1, 13) if schedule.due(Progress(step=step), ended="steps")] == [4, 8, 12]
    assert not schedule.due(Progress(step=4), ended="epochs")


def test_schedule_by_epochs_is_due_when_an_epoch_ends() -> None:
    schedule = Schedule(Duration(2, "epochs"))
    assert [epoch for epoch in range(1, 7) if schedule.due(Progress(epoch=epoch), ended="epochs")] == [2, 4, 6]
    assert not schedule.due(Progress(epoch=2), ended="steps")
    assert not schedule.due_by_clock(1e9)


def test_schedule_by_clock_counts_from_when_it_was_done() -> None:
    schedule = Schedule(Duration.parse("10m"))
    assert not schedule.due(Progress(step=600), ended="steps")
    assert [schedule.due_by_clock(elapsed_s) for elapsed_s in (0.0, 599.9, 600.0, 700.0)] == [False, False, True, True]
    schedule.done(700.0)
    assert [schedule.due_by_clock(elapsed_s) for elapsed_s in (701.0, 1299.0, 1300.0)] == [False, False, True]


def test_no_schedule_is_never_due() -> None:
    schedule = Schedule(None)
    assert not schedule.due(Progress(), ended="steps")
    assert not schedule.due(Progress(), ended="epochs")
    assert not schedule.due_by_clock(1e9)
