"""A second `Trainer.fit` at the folder of a live run is refused, and takes nothing away from the first one."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headway.trainer import Callback, Session, Trainer, TrainerConfig, World
from headway.trainer.errors import CheckpointError, RunConflictError
from headway.trainer.ownership import claim as claims
from headway.trainer.ownership.claim import acquire, claimed_by_driver
from tests.distributed import forking
from tests.tiny import TinyConfig, TinyTrainer

CONFIG = TinyConfig(max_steps=9, log_every="1 steps")


class Wait(Callback):
    """Says that step 3 is done, and waits until it is told to go on."""

    def __init__(self, there: Any, on: Any) -> None:
        self.there, self.on = there, on

    def on_step_end(self, trainer: Trainer[Any]) -> None:
        if trainer.global_step == 3 and not self.there.is_set():
            trainer.save_checkpoint()
            self.there.set()
            self.on.wait()


def _train(run_dir: str, there: Any, on: Any) -> None:
    result = TinyTrainer(CONFIG, run_dir=run_dir, world=World.single("cpu"), callbacks=[Wait(there, on)]).fit()
    assert result.steps == 9


@pytest.fixture
def first(tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    """A process that has made three updates, and the event that lets it continue."""
    context = forking()
    there, on = context.Event(), context.Event()
    process = context.Process(target=_train, args=(str(tmp_path / "run"), there, on), daemon=True)
    process.start()
    assert there.wait(60)
    yield process, on
    process.kill()
    process.join()


def fit(run_dir: Path, **options: Any) -> Any:
    return TinyTrainer(CONFIG, run_dir=run_dir, world=World.single("cpu"), **options).fit()


def test_a_second_start_is_refused_and_leaves_the_first_one_alone(tmp_path: Path, first: tuple[Any, Any]) -> None:
    process, on = first
    partial = tmp_path / "run" / "checkpoints" / ".partial-step-00000006-live"
    partial.mkdir()
    with pytest.raises(RunConflictError, match=rf"process {process.pid} on \S+ is training in {tmp_path}/run: wait"):
        fit(tmp_path / "run")
    assert partial.exists(), "a save in progress of the first"
    on.set()
    process.join(60)
    assert process.exitcode == 0
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 10))


def test_a_loop_of_your_own_is_an_owner_too(tmp_path: Path, first: tuple[Any, Any]) -> None:
    config, data = TrainerConfig(max_steps=1), [torch.ones(1, 1)]

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def session(folder: str) -> Session:
        return Session(config, model=nn.Linear(1, 1), optimizer=make, data=data, run_dir=tmp_path / folder)

    with pytest.raises(RunConflictError, match="is training in"), session("run"):
        pass
    with session("mine"), pytest.raises(RunConflictError, match=f"process {os.getpid()} on .* is training in"):
        acquire(str(tmp_path / "mine"))


def test_after_a_kill_the_next_start_resumes_at_once(
    tmp_path: Path, first: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, _ = first
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    monkeypatch.setattr(claims, "_LOOK_EVERY_S", None)  # any wait would raise
    result = fit(tmp_path / "run")
    assert result.resumed_from is not None
    assert result.steps == 9


def test_a_run_that_has_lost_its_folder_stops_and_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a suspended machine has woken up, when another one has taken over."""
    monkeypatch.setattr(claims, "BEAT_EVERY_S", 0.01)
    run_dir, taken = tmp_path / "run", []

    def take_over(trainer: Trainer[Any]) -> None:
        if trainer.global_step == 3:
            taken.append(acquire(str(run_dir), take_over=True))
        if trainer.global_step >= 3:
            while not trainer.should_stop and trainer.global_step == 3 and not trainer._engine.requests.stop_is_pending:
                pass

    callback = type("TakeOver", (Callback,), {"on_step_end": lambda self, trainer: take_over(trainer)})()
    with pytest.raises(CheckpointError, match=r"has taken over .*run. Only one run may write here"):
        fit(run_dir, callbacks=[callback])
    assert not list((run_dir / "checkpoints").glob("step-*"))
    assert taken[0].problem() is None
    taken[0].release()


def test_readers_and_drivers_are_not_owners(tmp_path: Path) -> None:
    """An evaluation beside the run, and the trainer of a Ray worker, whose driver owns the folder."""
    run_dir = tmp_path / "run"
    with acquire(str(run_dir)) as owner:
        TinyTrainer(CONFIG, run_dir=run_dir, world=World.single("cpu")).evaluate()
        with claimed_by_driver(str(run_dir)):
            assert fit(run_dir).steps == 9
        assert owner.problem() is None


def test_the_folder_is_free_after_a_failure(tmp_path: Path) -> None:
    def fail(trainer: Any) -> None:
        raise ZeroDivisionError

    callback = type("Fail", (Callback,), {"on_step_end": lambda self, trainer: fail(trainer)})()
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path / "run", callbacks=[callback])
    with acquire(str(tmp_path / "run")):
        pass
