"""Requests to save and to stop that arrive while the training thread waits for a batch."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from headway.trainer import Callback, CheckpointConfig, CheckpointError, FitResult, Session
from headway.trainer.checkpoints.rng import GeneratorsBefore
from tests.tiny import Rows, TinyConfig, TinyTrainer, weights

pytestmark = pytest.mark.filterwarnings("ignore:rank 0 has spent")

ROW, FOREVER_S = 61, 60.0


class BlockingRows(Rows):
    """Uses all generators of its process, and calls `block` in the middle of one row."""

    def __init__(self, num_rows: int, block: Callable[[], None] | None) -> None:
        super().__init__(num_rows)
        self.block = block

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        noise = torch.rand(6) + float(np.random.rand()) + random.random()
        if self.block is not None and self.blocks_in(row):
            self.block()
        return {**super().__getitem__(row), "x": self.x[row] + 0.01 * (noise + torch.rand(6))}

    def blocks_in(self, row: int) -> bool:
        return row == ROW


class BlockingTrainer(TinyTrainer):
    block: Callable[[], None] | None = None
    in_validation = False

    def configure_dataloaders(self) -> Any:
        config, at = self.config, self.block
        self.rows = rows = BlockingRows(config.num_rows, None if self.in_validation else at)
        validation = BlockingRows(ROW + 1, at if self.in_validation else None)
        return DataLoader(rows, batch_size=8, num_workers=config.num_workers), DataLoader(validation, batch_size=8)


def _config(**changes: Any) -> TinyConfig:
    return TinyConfig(
        **{"max_epochs": 2, "dropout": 0.2, "checkpoint": CheckpointConfig(every=None, keep_last=5), **changes}
    )


class Saved(Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.event = threading.Event()

    def on_checkpoint_saved(self, trainer: Any, checkpoint: Any) -> None:
        self.steps.append(checkpoint.step)
        self.event.set()


class Sleep:
    """Sleeps for a minute, in this process or in a worker process of a loader, and asks for something meanwhile."""

    def __init__(self, ask: Callable[[], None], marker: Path) -> None:
        self.ask, self.marker, self.process = ask, marker, os.getpid()

    def __call__(self) -> None:
        (self.marker / "began").touch()
        time.sleep(FOREVER_S)
        (self.marker / "ended").touch()

    def ask_when_it_has_begun(self) -> None:
        while not (self.marker / "began").exists():
            time.sleep(0.05)
        self.ask()

    def __reduce__(self) -> Any:
        return Sleep, (None, self.marker)


def _fit_and_ask(trainer: BlockingTrainer, sleep: Sleep, **options: Any) -> FitResult:
    trainer.block = sleep
    asker = threading.Thread(target=sleep.ask_when_it_has_begun)
    asker.start()
    result = trainer.fit(**options)
    asker.join()
    return result


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.extended)])
def test_a_stop_is_served_while_a_loader_blocks(tmp_path: Path, num_workers: int) -> None:
    run_dir = str(tmp_path / "run")
    whole = BlockingTrainer(_config(num_workers=num_workers))
    whole.fit()
    trainer = BlockingTrainer(_config(num_workers=num_workers), run_dir=run_dir)
    result = _fit_and_ask(trainer, Sleep(lambda: os.kill(os.getpid(), signal.SIGTERM), tmp_path))
    assert (result.status, result.reason) == ("interrupted", "SIGTERM")
    # With a worker process, the signal may come while the batch before the one that blocks is still trained.
    assert result.steps == ROW // 8 or (num_workers and result.steps == ROW // 8 - 1)
    assert not (tmp_path / "ended").exists()
    assert result.last_checkpoint is not None
    assert result.last_checkpoint.endswith(f"{result.steps:08d}")
    # Here and in another trainer, the run continues as if nothing had happened.
    trainer.block = None
    resumed = BlockingTrainer(_config(num_workers=num_workers), run_dir=run_dir)
    assert resumed.fit().resumed_from == result.last_checkpoint
    for name, value in weights(whole).items():
        assert torch.equal(weights(resumed)[name], value), name


def test_the_same_trainer_continues_after_a_read_that_was_ended(tmp_path: Path) -> None:
    whole, trainer = BlockingTrainer(_config()), BlockingTrainer(_config())
    whole.fit()
    sleep = Sleep(lambda: trainer.request_stop("enough"), tmp_path)
    assert _fit_and_ask(trainer, sleep).reason == "enough"
    trainer.rows.block = None
    assert trainer.fit().status == "completed"
    assert [each for _, rows in trainer.seen for each in rows] == [each for _, rows in whole.seen for each in rows]
    for name, value in weights(whole).items():
        assert torch.equal(weights(trainer)[name], value), name


def test_a_save_is_served_while_a_loader_blocks_and_training_continues(tmp_path: Path) -> None:
    whole = BlockingTrainer(_config())
    whole.fit()
    saved = Saved()
    trainer = BlockingTrainer(_config(), run_dir=str(tmp_path / "run"), callbacks=[saved])

    def block() -> None:
        if not saved.steps:
            trainer.request_save()
            assert saved.event.wait(FOREVER_S), "nothing was saved while the loader blocked"

    trainer.block = block
    first = trainer.fit()
    assert saved.steps[0] == ROW // 8
    assert first.status == "completed"
    for name, value in weights(whole).items():
        assert torch.equal(weights(trainer)[name], value), name
    # The checkpoint has the random states of before the read.
    resumed = BlockingTrainer(_config(), run_dir=str(tmp_path / "other"))
    resumed.fit(resume=str(tmp_path / f"run/checkpoints/step-{ROW // 8:08d}"))
    for name, value in weights(whole).items():
        assert torch.equal(weights(resumed)[name], value), name


def test_a_stop_ends_an_evaluation_whose_loader_blocks(tmp_path: Path) -> None:
    trainer = BlockingTrainer(_config(evaluate_every="3 steps"), run_dir=str(tmp_path / "run"))
    trainer.in_validation = True
    result = _fit_and_ask(trainer, Sleep(lambda: trainer.request_stop("enough"), tmp_path))
    assert (result.status, result.steps) == ("stopped", 3)
    assert "validation/loss" not in result.metrics
    assert not (tmp_path / "ended").exists()
    assert result.last_checkpoint is not None


def test_a_session_in_another_thread_is_stopped_while_its_loader_blocks(tmp_path: Path) -> None:
    """Code that waits by short calls, as loaders with worker processes do, is left there as well."""
    ended: list[FitResult] = []

    def endless() -> Any:
        for _row in range(5):
            yield {"x": torch.randn(4, 6), "y": torch.zeros(4, dtype=torch.long)}
        (tmp_path / "began").touch()
        for _ in range(int(FOREVER_S / 0.02)):
            time.sleep(0.02)
        (tmp_path / "ended").touch()

    def train() -> None:
        session = Session(
            _config(max_epochs=None, max_steps=50),
            model=lambda: torch.nn.Linear(6, 3),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            data=endless,
            run_dir=str(tmp_path / "run"),
        )
        sessions.append(session)
        with session as run:
            for batch in run:
                for micro_batch in run.accumulate(batch):
                    run.backward(torch.nn.functional.cross_entropy(run.model(micro_batch["x"]), micro_batch["y"]))
                run.step()
        ended.append(session.result)

    sessions: list[Session[Any]] = []
    thread = threading.Thread(target=train)
    thread.start()
    Sleep(lambda: sessions[0].request_stop("enough"), tmp_path).ask_when_it_has_begun()
    thread.join()
    assert (ended[0].status, ended[0].steps) == ("stopped", 5)
    assert not (tmp_path / "ended").exists()
    assert ended[0].last_checkpoint is not None


def test_a_save_that_fails_meanwhile_is_an_error_of_the_run(tmp_path: Path) -> None:
    class Broken(Callback):
        def on_checkpoint_start(self, trainer: Any) -> None:
            raise CheckpointError("no space")

    trainer = BlockingTrainer(_config(), run_dir=str(tmp_path / "run"), callbacks=[Broken()])
    with pytest.raises(CheckpointError, match="no space"):
        _fit_and_ask(trainer, Sleep(trainer.request_save, tmp_path))
    assert not (tmp_path / "ended").exists()


def test_random_states_are_known_if_the_slow_ones_have_not_changed() -> None:
    before = GeneratorsBefore()
    for _ in range(50):
        before.capture(time.perf_counter(), may_change=True)
    before._spent_s = 1e9  # no time left for another copy
    torch.manual_seed(6)
    before.capture(time.perf_counter(), may_change=True)
    expected = torch.rand(3)
    assert before.are_known
    before.restore()
    assert torch.equal(torch.rand(3), expected)
    random.random()
    assert not before.are_known
    before.capture(time.perf_counter(), may_change=True)
    assert not before.are_known
    before.capture(time.perf_counter(), may_change=False)
    assert before.are_known
    # A change that is noticed makes all later copies whole.
    before._spent_s = 0.0
    before.capture(time.perf_counter(), may_change=True)
    before._spent_s = 1e9
    before.capture(time.perf_counter(), may_change=True)
    expected_number = np.random.rand()
    assert before.are_known
    before.restore()
    assert np.random.rand() == expected_number
