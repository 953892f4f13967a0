"""The checkpoint that a PBT trial resumes from is not deleted before. Without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway.orchestrator import PBT, Experiment, LogUniform, Search
from headway.orchestrator.runs.open import open_run, open_sweep
from headway.orchestrator.runs.requests import StopRequest, request_stop
from headway.orchestrator.runs.run import Run
from headway.orchestrator.storage.events import EventWriter, read_events
from headway.orchestrator.storage.folder import Folder
from headway.orchestrator.sweeps.console import SweepConsole
from headway.orchestrator.sweeps.driver import SweepDriver
from headway.orchestrator.sweeps.pbt_checkpoints import PBTCheckpoints
from headway.orchestrator.train.signals import StopSignals
from headway.trainer import CheckpointConfig, load_weights
from headway.trainer.checkpoints.retention import is_kept, mark_kept
from headway.trainer.checkpoints.scan import split_path
from headway.trainer.errors import CheckpointError
from tests.tiny import TinyConfig, TinyTrainer

RATE = "config.learning_rate"
SEARCH = Search(space={RATE: LogUniform(1e-4, 1e-1)}, trials=2, scheduler=PBT())


def experiment(storage: Path) -> Experiment:
    return Experiment(name="pbt", trainer=TinyTrainer, config=TinyConfig(max_steps=9), storage=str(storage))


def train_donor(storage: Path, steps: int) -> str:
    """Train the first trial up to a step, keeping only its newest checkpoint, and return it."""
    config = TinyConfig(max_steps=steps, checkpoint=CheckpointConfig(keep_last=1, keep_best=0))
    result = TinyTrainer(config, run_dir=str(storage / "pbt/trial-000")).fit()
    return str(result.last_checkpoint)


def pinned(checkpoint: str) -> bool:
    storage, name = split_path(checkpoint)
    return is_kept(storage, name)


def lead(storage: Path) -> Any:
    """Return the objects that the driver of the sweep creates at each start."""
    return SweepDriver(
        experiment(storage), SEARCH, open_sweep(experiment(storage), SEARCH), None, SweepConsole("x", "min")
    )


def test_a_sweep_of_which_a_trial_was_stopped_has_not_completed(tmp_path: Path) -> None:
    """The same call resumes that trial, and the display shows which one trains."""
    driver = lead(tmp_path)
    driver._signals = StopSignals()
    for _ in range(2):
        driver.next_trial()
    assert len(driver._display._rows) == 2
    Run(str(tmp_path / "pbt/trial-000")).update(status="completed", reason="max_steps=9 reached")
    driver.ended("trial-000", None)
    stopped = Run(str(tmp_path / "pbt/trial-001"))
    request_stop(stopped.folder, StopRequest(reason="headway runs stop"))
    stopped.update(status="stopped", reason="headway runs stop")
    driver.ended("trial-001", None)
    assert driver._display._rows == {}
    assert driver._outcome() == ("stopped", "not trained to the end: trial-001")
    assert [trial.name for trial in lead(tmp_path)._waiting] == ["trial-001"]


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """A sweep with two suggested trials."""
    journal = open_sweep(experiment(tmp_path), SEARCH)
    for index in range(2):
        trial = SEARCH.trial(experiment(tmp_path), f"trial-00{index}", {RATE: 0.01})
        journal.note("trial_suggested", trial=trial.name, index=index, values={RATE: 0.01})
        open_run(trial)
    return tmp_path


def saves(storage: Path) -> None:
    """Write the events of the second trial: it started from the donor's checkpoint, and saved its own."""
    run_dir = storage / "pbt/trial-001"
    events = EventWriter(Folder(str(run_dir)), "rank-0", start="99-later")
    events.add("attempt_started", attempt=1, world_size=1, workers=[])
    events.add("checkpoint_saved", step=5, path="step-00000005")


def test_the_checkpoint_of_a_donor_stays_until_the_trial_has_saved_one_of_its_own(begun: Path) -> None:
    given = train_donor(begun, 2)
    driver = lead(begun)
    values, resume = driver.exploited("trial-001", given, {RATE: 0.02})
    assert (values[RATE], resume) == (0.02, given)
    # The donor continues twice, and would keep only its newest checkpoint and the one it resumed from.
    train_donor(begun, 4)
    train_donor(begun, 6)
    load_weights(given)
    # The last save before the change does not count as a save after it.
    run_dir = str(begun / "pbt/trial-001")
    before = EventWriter(Folder(run_dir), "rank-0", start=Run(run_dir).lease)
    before.add("checkpoint_saved", step=1, path="step-00000001")
    driver.reported("trial-001", {})
    assert pinned(given)
    saves(begun)
    driver.reported("trial-001", {})
    assert not pinned(given)
    train_donor(begun, 8)
    with pytest.raises(CheckpointError):
        load_weights(given)


def test_values_of_a_donor_stay_as_they_are_where_others_would_be_none(begun: Path) -> None:
    given = train_donor(begun, 2)
    driver = lead(begun)
    values, resume = driver.exploited("trial-001", given, {RATE: 0.02, "config.max_steps": -1})
    assert (values[RATE], resume) == (0.02, given), "what is no part of the space is passed over"
    values, resume = driver.exploited("trial-001", given, {RATE: "much"})
    assert (values[RATE], resume) == (0.01, given)
    *_, change = [each for each in read_events(Folder(str(begun / "pbt"))) if each["event"] == "trial_changed"]
    assert change["values"] == {RATE: 0.01}


def test_a_driver_that_was_killed_leaves_no_pin_for_good(begun: Path) -> None:
    given = train_donor(begun, 2)
    lead(begun).exploited("trial-001", given, {RATE: 0.02})
    # A resumed sweep starts the trial there, and keeps the checkpoint for it.
    again = lead(begun)
    assert again._trials["trial-001"].resume == given
    assert pinned(given)
    saves(begun)
    lead(begun)
    assert not pinned(given)


def test_what_is_gone_is_replaced_by_the_newest_and_what_a_person_has_pinned_stays_pinned(begun: Path) -> None:
    gone, _, there = train_donor(begun, 2), train_donor(begun, 4), train_donor(begun, 6)
    assert not Path(gone).exists()
    driver = lead(begun)
    assert driver.exploited("trial-001", gone, {RATE: 0.02})[1] == there
    (change,) = [each for each in read_events(Folder(str(begun / "pbt"))) if each["event"] == "trial_changed"]
    assert (change["checkpoint"], change["pinned"]) == (there, True)
    assert Run(str(begun / "pbt/trial-001")).experiment().config.learning_rate == 0.02

    # Two trials may resume from one checkpoint; it is released when both have.
    donors: PBTCheckpoints = driver._donors
    assert donors.keep("trial-002", there) == (there, True)
    donors.release("trial-002")
    assert pinned(there)
    donors.release("trial-001")
    assert not pinned(there)
    mark_kept(*split_path(there))
    assert donors.keep("trial-001", there) == (there, False)
    donors.release("trial-001")
    assert pinned(there)
    with pytest.raises(CheckpointError, match="its run has no other checkpoint"):
        donors.keep("trial-001", str(begun / "pbt/trial-001/checkpoints/step-00000001"))
