"""What a repeated start resumes from, after Ctrl-C or a lost driver. Without Ray."""

from __future__ import annotations

import functools
import io
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headway.orchestrator import RunResult, fit
from headway.orchestrator.cluster import connect
from headway.orchestrator.display.console import RunConsole
from headway.orchestrator.runs.resume import ResumeOptions
from headway.orchestrator.runs.stop import stop_run
from headway.orchestrator.sweeps.tune.trial import _train_here
from headway.orchestrator.train import driver, driver_watch
from headway.orchestrator.train.driver import RunDriver
from tests.orchestrator.runs.test_run import experiment
from tests.tiny import StopAt, TinyConfig, TinyTrainer


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Trains the run `tiny` in this process up to an update, where it is interrupted; returns the result, and what was
    shown."""
    monkeypatch.setattr(connect, "ray_connection", lambda *_, **__: nullcontext(True))
    monkeypatch.setattr(connect, "unused_gpus", lambda _: None)
    monkeypatch.setattr(driver_watch, "watch_driver", lambda *_: nullcontext())

    def begin(until: int, **options: Any) -> tuple[RunResult, str]:
        def train(experiment: Any, run: Any, *, resume_options: Any, verbose: bool, **_: Any) -> Any:
            callbacks = (StopAt(until),)
            return _train_here(experiment, run, callbacks=callbacks, resume_options=resume_options, verbose=verbose)

        monkeypatch.setattr(driver, "RunDriver", functools.partial(RunDriver, train=train))
        text = io.StringIO()
        display = RunConsole(Console(file=text, highlight=False, soft_wrap=True))
        return fit(experiment(tmp_path, max_steps=40), display=display, **options), text.getvalue()

    return begin


def test_the_same_start_again_goes_on_and_only_never_begins_anew(tmp_path: Path, begin: Any) -> None:
    base = TinyTrainer(TinyConfig(max_steps=4), run_dir=str(tmp_path / "base")).fit().last_checkpoint
    assert base is not None
    first, told = begin(7, resume=base)
    assert (first.status, first.steps, first.resumed_from) == ("interrupted", 7, base)
    assert "not from its newest" not in told
    assert told.splitlines()[-1] == "to resume, start it again"

    # As before, it goes on: also the second time, and where somebody has gone on without a wish in between.
    for until, options in ((9, {"resume": base}), (10, {}), (11, {"resume": base})):
        before = first
        first, told = begin(until, **options)
        assert (first.steps, first.resumed_from) == (until, before.last_checkpoint)
        assert ("started with these options before: resuming from what it has saved since" in told) == bool(options)

    # Some parts of its own checkpoint, once: the steps that this made are not made again.
    parts = {"restore": ["models"]}
    first, _ = begin(3, **parts)
    assert first.steps == 3
    before = first
    first, _ = begin(5, **parts)
    assert (first.steps, first.resumed_from) == (5, before.last_checkpoint)

    # A wish is a wish: it is said what it leaves, and how not to repeat it.
    for _ in range(2):
        before = first
        first, told = begin(2, resume="never")
        assert (first.steps, first.resumed_from) == (2, None)
        assert f"starting from step 0 as requested, not from the newest checkpoint {before.last_checkpoint}" in told
        assert told.splitlines()[-1] == "to resume, start it again without --resume never"
        assert "start it again without --resume never" in stop_run("tiny", str(tmp_path))
    before = first
    first, told = begin(6, resume=base)
    assert first.resumed_from == base
    assert f"starting from {base} as requested, not from the newest checkpoint {before.last_checkpoint}" in told


def test_what_was_begun_so_and_has_saved_nothing_begins_so_again() -> None:
    asked = ResumeOptions(resume="/base/step-5", restore=("models", "progress"))
    started, saved = {"event": "driver_started", **asked.explicit}, {"event": "checkpoint_saved"}
    assert asked.for_restart([]) == asked
    assert asked.for_restart([started]) == asked
    assert asked.for_restart([saved, started]) == asked
    assert asked.for_restart([started, saved]) == ResumeOptions()
    assert asked.for_restart([started, {"event": "driver_started"}, saved]) == ResumeOptions()
    other = {"event": "driver_started", **ResumeOptions(resume="/base/step-5").explicit}
    assert asked.for_restart([started, saved, other, saved]) == asked
    assert ResumeOptions().explicit == {}
