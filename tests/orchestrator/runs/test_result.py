"""`RunResult` from the result of a worker, or from the files of the run."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from headway.orchestrator import Experiment, RunResult
from headway.orchestrator.cli.show import print_run
from headway.orchestrator.runs.open import open_run
from headway.trainer import FitResult
from tests.tiny import TinyConfig, TinyTrainer


def test_a_run_s_result_has_all_that_a_trainer_s_has() -> None:
    """The worker's result travels as a dict of its fields."""
    assert {each.name for each in fields(FitResult)} <= {each.name for each in fields(RunResult)}


def test_goodput_is_the_number_that_the_page_of_the_run_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """30 s of updates in a run of 40 s that has ended; the current time does not matter."""
    run = open_run(Experiment(name="one", trainer=TinyTrainer, config=TinyConfig(), storage=str(tmp_path))).run
    seconds = {"setting up": 4.0, "reading data": 2.0, "first update": 3.0, "forward": 12.0, "optimizer": 15.0}
    spent = {"attempt": 1, "at": 1038.0, "step": 10, "updates": 10, "phase": "ended", "seconds": seconds}
    for event in (
        {"time": 1000.0, "event": "driver_started"},
        {"time": 1002.0, "event": "attempt_started", "attempt": 1, "world_size": 1, "workers": []},
        {"time": 1038.0, "event": "attempt_ended", "attempt": 1, "step": 10, "spent": spent},
        {"time": 1040.0, "event": "driver_ended"},
    ):
        run.folder.append("events.jsonl", json.dumps(event))
    run.update(status="completed")
    result = RunResult.recorded(run, status="completed", reason="")
    # Of the first update as much as the nine others took: it compiled besides.
    assert result.goodput == pytest.approx(30 / 40)
    print_run("one", str(tmp_path))
    assert (
        f"goodput    {100 * result.goodput:.1f} % of the time went into updates that counted" in capsys.readouterr().out
    )
