"""Requests to save and to stop on two ranks that read `exact` data, and wait for the same batch or for another."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from headway.trainer import CheckpointConfig, FitResult, World, private_torch
from headway.trainer.loop.common_read import CommonRead
from tests.distributed import run_on_ranks
from tests.tiny import TinyConfig, TinyTrainer, weights
from tests.trainer.loop import test_blocked_reads as blocked_reads
from tests.trainer.loop.test_blocked_reads_on_ranks import SaveAfter, Saved

pytestmark = pytest.mark.filterwarnings("ignore:rank 0 has spent")

AT, FOREVER_S = 4, 60.0


class BlockingRows(blocked_reads.BlockingRows):
    """Blocks in the middle of a batch of four rows, the same of each rank."""

    num_read = 0

    def blocks_in(self, row: int) -> bool:
        self.num_read += 1
        return self.num_read == 4 * AT + 2


class Reads(TinyTrainer):
    block: Callable[[], None] | None = None
    in_validation = False

    def configure_dataloaders(self) -> Any:
        rows = BlockingRows(48, None if self.in_validation else self.block)
        validation = BlockingRows(48, self.block if self.in_validation else None)
        return DataLoader(rows, batch_size=4, drop_last=True), DataLoader(validation, batch_size=4)


def _config(**changes: Any) -> TinyConfig:
    settings = {"max_epochs": 2, "evaluate_every": None, "dropout": 0.2, "checkpoint": CheckpointConfig(every=None)}
    return TinyConfig(**{**settings, **changes})  # type: ignore[arg-type]


def _whole(world: World) -> Reads:
    trainer = Reads(_config(), world=world)
    assert trainer.fit().status == "completed"
    return trainer


def _equal(one: TinyTrainer, other: TinyTrainer) -> bool:
    mine, theirs = weights(one), weights(other)
    return all(torch.equal(value, theirs[name]) for name, value in mine.items())


def _fit_and_ask(trainer: Reads, ask: Callable[[], None] | None, folder: Path) -> FitResult:
    """Train until both ranks sleep inside a read, and let this rank ask for something then."""
    rank = trainer.world.rank

    def sleep() -> None:
        (folder / f"began-{rank}").touch()
        time.sleep(FOREVER_S)
        (folder / f"ended-{rank}").touch()

    def wait_and_ask() -> None:
        while len(list(folder.glob("began-*"))) < 2:
            time.sleep(0.05)
        if ask is not None:
            ask()

    trainer.block = sleep
    asker = threading.Thread(target=wait_and_ask)
    asker.start()
    result = trainer.fit()
    asker.join()
    assert not list(folder.glob("ended-*"))
    return result


def _stop(world: World, folder: str, asker: int) -> None:
    whole = _whole(world)
    trainer = Reads(_config(), world=world, run_dir=f"{folder}/run")
    ask: Callable[[], None] | None = None
    if asker == world.rank:
        ask = (lambda: os.kill(os.getpid(), signal.SIGTERM)) if asker == 1 else (lambda: trainer.request_stop("enough"))
    result = _fit_and_ask(trainer, ask, Path(folder))
    assert (result.status, result.reason) == (("interrupted", "SIGTERM") if asker == 1 else ("stopped", "enough"))
    assert result.steps == AT
    resumed = Reads(_config(), world=world, run_dir=f"{folder}/run")
    assert resumed.fit().resumed_from == result.last_checkpoint is not None
    assert trainer.seen + resumed.seen == whole.seen
    assert _equal(resumed, whole)


@pytest.mark.parametrize("asker", [pytest.param(0, marks=pytest.mark.extended), 1])
def test_a_stop_is_served_while_both_ranks_wait_for_the_same_batch(tmp_path: Path, asker: int) -> None:
    run_on_ranks(_stop, 2, str(tmp_path), asker)


def _save(world: World, folder: str) -> None:
    whole, saved = _whole(world), Saved()
    trainer = Reads(_config(), world=world, run_dir=f"{folder}/run", callbacks=[saved, SaveAfter(AT)])

    def block() -> None:
        assert saved.event.wait(FOREVER_S), "nothing was saved while the loader blocked"

    trainer.block = block
    assert trainer.fit().status == "completed"
    assert saved.steps == [AT, 12]
    assert trainer.seen == whole.seen
    assert _equal(trainer, whole)
    resumed = Reads(_config(), world=world, run_dir=f"{folder}/other")
    resumed.fit(resume=f"{folder}/run/checkpoints/step-{AT:08d}")
    assert resumed.seen == [each for each in whole.seen if each[0] >= AT]
    assert _equal(resumed, whole)


def test_a_save_is_served_while_both_ranks_wait_and_training_continues(tmp_path: Path) -> None:
    run_on_ranks(_save, 2, str(tmp_path))


def _one_goes_on(world: World, folder: str, seconds: tuple[float, float], has_store: bool) -> None:
    if not has_store:
        private_torch.store_of = lambda group: None
    whole, saved = _whole(world), Saved()
    trainer = Reads(_config(), world=world, run_dir=f"{folder}/run", callbacks=[saved])

    def block() -> None:
        if world.rank == 1:
            threading.Timer(1.0, trainer.request_save).start()
        time.sleep(seconds[world.rank])

    trainer.block = block
    assert trainer.fit().status == "completed"
    assert len(saved.steps) == 2
    assert saved.steps[0] in (AT + 1, AT + 2, AT + 3), "after the read, which one rank has left already"
    assert trainer.seen == whole.seen
    assert _equal(trainer, whole)


@pytest.mark.parametrize("seconds", [(0.0, 2.0), pytest.param((0.8, 2.0), marks=pytest.mark.extended), (2.0, 0.9)])
def test_a_request_waits_where_one_rank_has_its_batch(tmp_path: Path, seconds: tuple[float, float]) -> None:
    run_on_ranks(_one_goes_on, 2, str(tmp_path), seconds, True)


def test_a_request_waits_where_torch_does_not_tell_its_store(tmp_path: Path) -> None:
    run_on_ranks(_one_goes_on, 2, str(tmp_path), (1.5, 1.5), False)


def _stop_evaluation(world: World, folder: str) -> None:
    trainer = Reads(_config(evaluate_every="3 steps"), world=world, run_dir=f"{folder}/run")
    trainer.in_validation = True
    ask = (lambda: trainer.request_stop("enough")) if world.is_main else None
    result = _fit_and_ask(trainer, ask, Path(folder))
    assert (result.status, result.steps) == ("stopped", 3)
    assert "validation/loss" not in result.metrics
    assert result.last_checkpoint is not None


def test_a_stop_ends_an_evaluation_in_which_both_ranks_wait(tmp_path: Path) -> None:
    run_on_ranks(_stop_evaluation, 2, str(tmp_path))


def test_ranks_serve_only_while_none_has_its_batch() -> None:
    store = dist.HashStore()
    one, two = (CommonRead(store, 2) for _ in range(2))
    for each in (one, two):
        each.begin(in_training=True)
    assert not one.look(wants=True), "the other does not wait"
    assert not two.look(wants=False)
    assert one.look(wants=True)
    assert two.look(wants=False)
    # Again, in the same read; but now the batch of one comes before the other looks.
    assert not two.look(wants=True)
    assert not one.look(wants=False)
    assert two.look(wants=True)
    assert one.leave(), "its batch has come after the decision"
    # Its batch is used now; the other finds that no rank waits.
    assert not one.leave()
    assert not two.look(wants=True)
    assert not two.leave()

    for each in (one, two):
        each.begin(in_training=True)
    assert not one.look(wants=False)
    assert not one.leave()
    assert not two.look(wants=True)
    assert two.is_over
    assert not two.leave()
    for each in (one, two):
        each.begin(in_training=False)
    assert not two.leave(), "a short read asks nothing of the store"
    assert not one.look(wants=True)
