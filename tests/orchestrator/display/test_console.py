"""The console output of a run."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from headway.orchestrator.display.console import RunConsole
from headway.orchestrator.runs.open import open_run
from headway.orchestrator.storage.events import Event
from headway.orchestrator.train.fit import _greet
from tests.orchestrator.runs.test_run import experiment

EVENTS: list[dict[str, Any]] = [
    {"event": "attempt_started", "attempt": 1, "world_size": 2, "workers": [{"host": "a"}, {"host": "a"}]},
    {"event": "training", "step": 0, "total_steps": 100},
    {"event": "message", "text": "[bold]hello[/bold]"},
    {"event": "evaluated", "step": 10, "metrics": {"validation/loss": 0.5}},
    {"event": "checkpoint_saved", "step": 10, "path": "/runs/a/checkpoints/step-00000010"},
    {"event": "group_failed", "text": "the worker of rank 1 died", "retrying": True},
    {"event": "attempt_started", "attempt": 2, "world_size": 1, "workers": [{"host": "b"}]},
    {"event": "restored", "step": 10, "epoch": 0},
    {"event": "of_a_later_version"},
]
RUN_RECORD = {
    "step": 5,
    "epoch": 0,
    "attempt": 1,
    "train/loss": 1.5,
    "tokens_per_s": 2000.0,
    "step_s": 0.1,
    "elapsed_s": 1.0,
}


def shown(*, terminal: bool) -> str:
    file = io.StringIO()
    display = RunConsole(Console(file=file, force_terminal=terminal, width=100, highlight=False))
    display.event(EVENTS[0])
    display.event(EVENTS[1])
    display.record(RUN_RECORD)
    for event in EVENTS[2:]:
        display.event(event)
    display.record({"step": 10, "epoch": 0, "attempt": 1, "validation/loss": 0.5})
    display.close()
    return file.getvalue()


def test_a_file_gets_one_line_for_each_thing_and_no_control_characters() -> None:
    assert shown(terminal=False).splitlines() == [
        "attempt 1: 2 workers on a",
        "step 5/100 · epoch 0 · loss 1.5 · 2,000 tokens/s · 10s left",
        "[bold]hello[/bold]",
        "step 10 · validation/loss 0.5",
        "step 10 · checkpoint /runs/a/checkpoints/step-00000010",
        "the worker of rank 1 died; restarting the workers",
        "attempt 2: 1 worker on b",
        "resuming from step 10 (attempt 2)",
    ]


def test_a_terminal_gets_a_bar_below_the_lines() -> None:
    text = shown(terminal=True)
    assert "step 5/100 · epoch 0 · loss 1.5" in text
    assert "━" in text
    assert "resuming from step 10 (attempt 2)" in text


def test_a_terminal_shows_that_a_run_is_starting_and_takes_it_away_where_it_never_trains() -> None:
    file = io.StringIO()
    display = RunConsole(Console(file=file, force_terminal=True, width=100, highlight=False))
    display.starting("starting 2 workers")
    time.sleep(0.3)
    display.close()
    text = file.getvalue()
    assert text.count("starting 2 workers") > 1  # the bar moves
    assert "starting 2 workers" not in text.splitlines()[-1]


def test_a_narrow_terminal_shows_the_bar_the_speed_and_the_time_left() -> None:
    file = io.StringIO()
    display = RunConsole(Console(file=file, force_terminal=True, width=80, highlight=False))
    display.event(EVENTS[1])
    display.record({**RUN_RECORD, "step": 50, "data_wait": 0.0, "train/loss": 2.1241, "tokens_per_s": 12195.0})
    display.close()
    last = Text.from_ansi(file.getvalue().rpartition("\r")[2]).plain.splitlines()[0]
    assert last.endswith("  50% step 50/100 · loss 2.124 · 12,195 tokens/s · 5s left")
    assert last.startswith("━" * 8)


def test_a_file_is_not_told_that_a_run_is_starting() -> None:
    file = io.StringIO()
    display = RunConsole(Console(file=file, width=100, highlight=False))
    display.starting("starting 2 workers")
    display.close()
    assert not file.getvalue()


@pytest.mark.parametrize(
    ("is_resumed", "attempt", "resume", "events", "says"),
    [
        (True, 1, None, [], True),
        (False, 2, None, [], True),
        (True, 2, None, [{"event": "resized", "from": 1, "to": 2, "step": 0}], True),
        (False, 1, None, [], False),
        (True, 3, "never", [], False),
        (True, 3, "elsewhere/step-00000010", [{"event": "restored", "step": 0, "epoch": 0}], False),
    ],
)
def test_a_resumed_run_without_a_checkpoint_says_so(
    is_resumed: bool, attempt: int, resume: str | None, events: list[Event], says: bool
) -> None:
    file = io.StringIO()
    display = RunConsole(Console(file=file, width=100, highlight=False))
    display.is_resumed = is_resumed
    display.event({"event": "driver_started", **({"resume": resume} if resume else {})})
    display.event({**EVENTS[0], "attempt": attempt})
    for event in events:
        display.event(event)
    display.event({"event": "training", "step": 0, "total_steps": 100})
    text = file.getvalue()
    assert ("no checkpoint yet: starting at step 0" in text) is says
    assert "resuming" not in text or not says


def test_the_display_knows_whether_the_run_is_resumed(tmp_path: Path) -> None:
    asked, display = experiment(tmp_path), RunConsole(Console(file=io.StringIO()))
    opened = open_run(asked)
    _greet(opened, asked, display)
    assert not display.is_resumed
    opened.run.update(status="interrupted")
    _greet(open_run(asked), asked, display)
    assert display.is_resumed
