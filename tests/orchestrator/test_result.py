"""What a worker says of its run is what `fit` returns."""

from __future__ import annotations

from dataclasses import fields

from headway.orchestrator.result import RunResult
from headway.trainer import FitResult


def test_a_run_s_result_has_all_that_a_trainer_s_has() -> None:
    """The worker's result travels as a dict of its fields."""
    assert {each.name for each in fields(FitResult)} <= {each.name for each in fields(RunResult)}
