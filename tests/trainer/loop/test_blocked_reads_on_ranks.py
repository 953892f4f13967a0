"""Requests to save and to stop on two ranks, of which one or both wait for a batch."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from headway.trainer import Callback, CheckpointConfig, FitResult, ParallelConfig, World
from tests.distributed import run_on_ranks
from tests.tiny import Rows, TinyConfig, TinyTrainer, weights

pytestmark = pytest.mark.filterwarnings("ignore:rank 0 has spent")

AT, FOREVER_S = 7, 60.0


class Walk:
    """Yields noisy batches in this rank's order, and calls `block` in the middle of one. Its state is where it is."""

    def __init__(self, rank: int, block: Callable[[], None] | None, *, num_batches: int = 12) -> None:
        self.rows, self.rank, self.block, self.num_batches = Rows(48), rank, block, num_batches
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        while self.position < self.num_batches:
            ids = [(5 * self.rank + 4 * self.position + n) % len(self.rows) for n in range(4)]
            self.position += 1
            noise = torch.rand(6) + float(np.random.rand()) + random.random()
            if self.position == AT and self.block is not None:
                self.block()
            batch = default_collate([self.rows[row] for row in ids])
            yield {**batch, "x": batch["x"] + 0.01 * (noise + torch.rand(6))}
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]


class Reads(TinyTrainer):
    """Trains on the data of this rank, and validates on a list or on other data."""

    def __init__(self, data: Any, config: TinyConfig, world: World, *, validation: Any = None, **options: Any) -> None:
        super().__init__(config, world=world, **options)
        self.data, self.validation_data = data, validation

    def configure_dataloaders(self) -> Any:
        return self.data, self.validation_data


class Saved(Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.event = threading.Event()

    def on_checkpoint_saved(self, trainer: Any, checkpoint: Any) -> None:
        self.steps.append(checkpoint.step)
        self.event.set()


class Sleep:
    """Sleeps for a minute, unless it is interrupted."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank

    def __call__(self) -> None:
        (self.folder / f"began-{self.rank}").touch()
        time.sleep(FOREVER_S)
        (self.folder / f"ended-{self.rank}").touch()


def _config(**changes: Any) -> TinyConfig:
    settings = {"max_epochs": 2, "evaluate_every": None, "dropout": 0.2, "checkpoint": CheckpointConfig(every=None)}
    return TinyConfig(**{**settings, **changes})  # type: ignore[arg-type]


def _equal(one: TinyTrainer, other: TinyTrainer) -> bool:
    mine, theirs = weights(one), weights(other)
    return all(torch.equal(value, theirs[name]) for name, value in mine.items())


def _whole(world: World, config: TinyConfig) -> Reads:
    trainer = Reads(Walk(world.rank, None), config, world)
    trainer.fit()
    return trainer


def _fit_and_ask(trainer: Reads, ask: Callable[[], None] | None, began: list[Path]) -> FitResult:
    def wait_and_ask() -> None:
        while not all(each.exists() for each in began):
            time.sleep(0.05)
        if ask is not None:
            ask()

    asker = threading.Thread(target=wait_and_ask)
    asker.start()
    result = trainer.fit()
    asker.join()
    return result


def _stop(world: World, folder: str, blocked: list[int], asker: int, accumulation: int) -> None:
    config = _config(gradient_accumulation_steps=accumulation)
    whole, tmp = _whole(world, config), Path(folder)
    data = Walk(world.rank, Sleep(tmp, world.rank) if world.rank in blocked else None)
    trainer = Reads(data, config, world, run_dir=str(tmp / "run"))
    ask: Callable[[], None] | None = None
    if asker == world.rank:
        ask = (lambda: os.kill(os.getpid(), signal.SIGTERM)) if asker == 1 else (lambda: trainer.request_stop("enough"))
    result = _fit_and_ask(trainer, ask, [tmp / f"began-{rank}" for rank in blocked])
    assert (result.status, result.reason) == (("interrupted", "SIGTERM") if asker == 1 else ("stopped", "enough"))
    assert result.steps == (AT - 1) // accumulation
    assert not list(tmp.glob("ended-*"))
    assert result.last_checkpoint is not None
    # The same trainer continues with the batch that some ranks have read already, and so does another one.
    data.block = None
    assert trainer.fit().status == "completed"
    assert trainer.seen == whole.seen
    assert _equal(trainer, whole)
    resumed = Reads(Walk(world.rank, None), config, world, run_dir=str(tmp / "other"))
    resumed.fit(resume=result.last_checkpoint)
    assert resumed.seen == whole.seen[AT - 1 :]
    assert _equal(resumed, whole)


@pytest.mark.parametrize(
    ("blocked", "asker", "accumulation"),
    [
        pytest.param([1], 0, 1, id="one"),
        pytest.param([1], 1, 2, id="itself", marks=pytest.mark.extended),
        pytest.param([0, 1], 0, 1, id="both", marks=pytest.mark.extended),
    ],
)
def test_all_ranks_save_and_stop_while_a_loader_blocks(
    tmp_path: Path, blocked: list[int], asker: int, accumulation: int
) -> None:
    run_on_ranks(_stop, 2, str(tmp_path), blocked, asker, accumulation)


class SaveAfter(Callback):
    """Requests a save in the update before the read that blocks, from which ranks learn it after the next only."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Any) -> None:
        if trainer.global_step == self.step and trainer.world.is_main:
            trainer.request_save()


def _save(world: World, folder: str, blocked: list[int]) -> None:
    whole, saved = _whole(world, _config()), Saved()

    def block() -> None:
        if not saved.steps:
            assert saved.event.wait(FOREVER_S), "nothing was saved while the loader blocked"

    data = Walk(world.rank, block if world.rank in blocked else None)
    trainer = Reads(data, _config(), world, run_dir=f"{folder}/run", callbacks=[saved, SaveAfter(AT - 1)])
    assert trainer.fit().status == "completed"
    # Once: the request is not served again after the update.
    assert saved.steps == [AT - 1, 24]
    assert trainer.seen == whole.seen
    assert _equal(trainer, whole)
    resumed = Reads(Walk(world.rank, None), _config(), world, run_dir=f"{folder}/other")
    resumed.fit(resume=f"{folder}/run/checkpoints/step-{AT - 1:08d}")
    assert resumed.seen == whole.seen[AT - 1 :]
    assert _equal(resumed, whole)


@pytest.mark.parametrize(
    "blocked", [pytest.param([0], id="one"), pytest.param([0, 1], id="both", marks=pytest.mark.extended)]
)
def test_all_ranks_save_while_a_loader_blocks_and_training_continues(tmp_path: Path, blocked: list[int]) -> None:
    run_on_ranks(_save, 2, str(tmp_path), blocked)


def _stop_evaluation(world: World, folder: str) -> None:
    tmp = Path(folder)
    validation = Walk(world.rank, Sleep(tmp, world.rank) if world.rank == 1 else None)
    config = _config(evaluate_every="3 steps")
    trainer = Reads(Walk(world.rank, None), config, world, validation=validation, run_dir=str(tmp / "run"))
    ask = (lambda: trainer.request_stop("enough")) if world.is_main else None
    result = _fit_and_ask(trainer, ask, [tmp / "began-1"])
    assert (result.status, result.steps) == ("stopped", 3)
    assert "validation/loss" not in result.metrics
    assert not list(tmp.glob("ended-*"))
    assert result.last_checkpoint is not None


def test_a_stop_ends_an_evaluation_on_all_ranks_if_the_loader_of_one_blocks(tmp_path: Path) -> None:
    run_on_ranks(_stop_evaluation, 2, str(tmp_path))


def _wait_for_others(world: World, folder: str) -> None:
    parallel = ParallelConfig(timeout="120s", step_timeout="4s")
    data = Walk(world.rank, Sleep(Path(folder), world.rank) if world.rank == 1 else None)
    trainer = Reads(data, _config(parallel=parallel), world)
    if world.rank == 0:
        with pytest.raises(TimeoutError, match="1 of 2 ranks have waited for a batch for more than 4 s"):
            trainer.fit()
        os._exit(0)
    trainer.fit()


def test_a_rank_with_a_batch_does_not_wait_for_others_forever(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 1 raised"):
        run_on_ranks(_wait_for_others, 2, str(tmp_path))
    assert not (tmp_path / "ended-1").exists()
