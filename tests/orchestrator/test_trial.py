"""What a trial does in its process, and what it says when it cannot be judged. Without Ray."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray import cloudpickle

from headway.orchestrator import supervision, trial
from headway.orchestrator.claiming import open_run
from headway.orchestrator.runs import Run
from headway.orchestrator.trial import Relay, SweepTask, run_trial
from headway.trainer.errors import ConfigError
from tests.orchestrator.test_runs import experiment


@pytest.mark.parametrize("metric", ["train/los", "validation/los"])
def test_a_trial_that_never_gives_the_metric_of_the_sweep_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metric: str
) -> None:
    found = experiment(tmp_path)
    open_run(found)
    context = SimpleNamespace(get_trial_name=lambda: found.name)
    tune = SimpleNamespace(get_context=lambda: context, get_checkpoint=lambda: None, report=pytest.fail)
    monkeypatch.setattr(trial, "tune", tune)
    monkeypatch.setattr(supervision, "places_taken", set)
    task = SweepTask(
        experiment=cloudpickle.dumps(found), sweep_dir=str(tmp_path), metric=metric, mode="min", pauses=False,
        may_change=False, imports=(), current_dir=os.getcwd(),
    )  # fmt: skip
    run_trial({"trial": found.name, "resume": "auto"}, task)
    run = Run(found.run_dir)
    assert run.status == "failed"
    assert f"metric is '{metric}', but " in (run.record.error or "")
    assert f"{metric}s" in (run.record.error or ""), "what there is instead"

    # Workers of its own tell of evaluations by their events.
    if metric.startswith("validation/"):
        with pytest.raises(ConfigError, match="metric is 'validation/los', but an evaluation gives validation/loss"):
            Relay(task).event({"event": "evaluated", "step": 1, "metrics": {"validation/loss": 1.0}})
