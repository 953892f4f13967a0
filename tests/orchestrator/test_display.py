"""What the person at the driver sees of a run (F7)."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from headway.orchestrator.display import Display

EVENTS: list[dict[str, Any]] = [
    {"event": "attempt_started", "attempt": 1, "world_size": 2, "workers": [{"host": "a"}, {"host": "a"}]},
    {"event": "training", "step": 0, "total_steps": 100},
    {"event": "message", "text": "[bold]hello[/bold]"},
    {"event": "evaluated", "step": 10, "metrics": {"validation/loss": 0.5}},
    {"event": "checkpoint_saved", "step": 10, "path": "/runs/a/checkpoints/step-00000010"},
    {"event": "group_failed", "text": "the worker of rank 1 died", "hopeless": False},
    {"event": "attempt_started", "attempt": 2, "world_size": 1, "workers": [{"host": "b"}]},
    {"event": "restored", "step": 10, "epoch": 0},
    {"event": "of_a_later_version"},
]
RECORD = {
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
    display = Display(Console(file=file, force_terminal=terminal, width=100, highlight=False))
    display.event(EVENTS[0])
    display.event(EVENTS[1])
    display.record(RECORD)
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
        "the worker of rank 1 died; starting the workers again",
        "attempt 2: 1 worker on b",
        "going on from step 10 (attempt 2)",
    ]


def test_a_terminal_gets_a_bar_below_the_lines() -> None:
    text = shown(terminal=True)
    assert "step 5/100 · epoch 0 · loss 1.5" in text
    assert "━" in text
    assert "going on from step 10 (attempt 2)" in text
