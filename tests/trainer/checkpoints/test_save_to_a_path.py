"""A checkpoint at a path of the user's: whole, loadable in every way, and no part of the run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headway.trainer import (
    Callback,
    CheckpointConfig,
    CheckpointError,
    ConfigError,
    ParallelConfig,
    Session,
    TrainerConfig,
    World,
    load_weights,
)
from headway.trainer.checkpoints.store import CheckpointStore
from tests.distributed import run_on_ranks
from tests.tiny import TinyConfig, TinyTrainer, weights

ALONE = World.single("cpu")


def _config(**changes: Any) -> TinyConfig:
    """Four updates in an epoch."""
    return TinyConfig(**{"num_rows": 32, "max_epochs": 2, "dropout": 0.1, "noise": 0.1, **changes})


class SavesAt(Callback):
    def __init__(self, step: int, path: str | Path) -> None:
        self.step, self.path = step, path
        self.weights: dict[str, torch.Tensor] = {}
        self.reported: list[str] = []

    def on_step_end(self, trainer: Any) -> None:
        if trainer.global_step == self.step:
            self.checkpoint = trainer.save_checkpoint(self.path)
            self.weights = weights(trainer)

    def on_checkpoint_saved(self, trainer: Any, checkpoint: Any) -> None:
        self.reported.append(checkpoint.path)


def _same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return bool(one) and all(torch.equal(one[name], two[name]) for name in one.keys() | two.keys())


def test_it_is_whole_and_no_part_of_the_run(tmp_path: Path) -> None:
    path = tmp_path / "kept" / "third step"
    saves = SavesAt(3, path)
    config = _config(checkpoint=CheckpointConfig(every="2 steps", keep_last=1, keep_best=0))  # type: ignore[arg-type]
    trainer = TinyTrainer(config, run_dir=tmp_path / "run", world=ALONE, callbacks=[saves])
    trainer.fit()
    assert (saves.checkpoint.path, saves.checkpoint.step) == (str(path), 3)
    own = CheckpointStore(tmp_path / "run/checkpoints", world=ALONE).list()
    assert [each.step for each in own] == [8]
    assert [each.split("/")[-1].split(".")[0] for each in saves.reported] == [
        f"step-0000000{step}" for step in (2, 4, 6, 8, 8)
    ]
    assert os.listdir(path.parent) == ["third step"]

    assert _same({f"model.{name}": each for name, each in load_weights(path).items()}, saves.weights)
    begun = TinyTrainer(_config(init_from=str(path)), world=ALONE, printer=lambda text: None)
    wanted = begun.evaluate()
    assert trainer.evaluate(checkpoint=path) == wanted
    resumed = TinyTrainer(config, run_dir=tmp_path / "other", world=ALONE)
    assert resumed.fit(resume=str(path)).resumed_from == str(path)
    assert resumed.seen[0][0] == 3
    assert _same(weights(resumed), weights(trainer))


def test_it_replaces_a_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    """A resumed run comes to the same line again."""
    trainer = TinyTrainer(_config(), world=ALONE)
    first = trainer.save_checkpoint(tmp_path / "mine")
    trainer.train_epoch()
    second = trainer.save_checkpoint(f"{tmp_path}/mine/")
    assert (first.path, first.step, second.step) == (second.path, 0, 4)
    assert _same({f"model.{name}": each for name, each in load_weights(second.path).items()}, weights(trainer))
    assert os.listdir(tmp_path) == ["mine"]
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("one")
    with pytest.raises(CheckpointError, match="thesis exists and is not a checkpoint"):
        trainer.save_checkpoint(tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter").read_text() == "one"


def test_a_killed_replacement_is_named_and_the_next_save_succeeds(tmp_path: Path) -> None:
    """The state of the folder after a kill between the two renames of a commit."""
    trainer = TinyTrainer(_config(), world=ALONE)
    path = Path(trainer.save_checkpoint(tmp_path / "mine").path)
    aside = path.rename(tmp_path / ".replaced-mine01234567")
    other = path.with_name("other")
    trainer.save_checkpoint(other)
    other.rename(tmp_path / ".replaced-mineother01234567")
    with pytest.raises(CheckpointError, match=f"interrupted. The earlier checkpoint is {aside}: rename it to mine"):
        load_weights(path)
    trainer.train_epoch()
    assert trainer.save_checkpoint(path).step == 4
    assert sorted(os.listdir(tmp_path)) == [".replaced-mineother01234567", "mine"]
    assert _same({f"model.{name}": each for name, each in load_weights(path).items()}, weights(trainer))


def test_the_runs_own_folder_is_refused_and_no_other_is_needed(tmp_path: Path) -> None:
    TinyTrainer(_config(), run_dir=tmp_path / "run", world=ALONE).fit()
    there = TinyTrainer(_config(), run_dir=tmp_path / "run", world=ALONE)
    with pytest.raises(ConfigError, match="path=.*mine must be the path of a new folder outside of"):
        there.save_checkpoint(tmp_path / "run/checkpoints/mine")
    # Not restored: a checkpoint of its own could delete those of the run.
    with pytest.raises(ConfigError, match="has checkpoints of a run that has not been restored"):
        there.save_checkpoint()
    assert there.save_checkpoint("memory://headway-test-path/first").path == "memory://headway-test-path/first"
    assert load_weights("memory://headway-test-path/first").keys() == there.model.state_dict().keys()
    there.save_checkpoint("memory://headway-test-path/first")


def test_a_loop_of_your_own_saves_alike(tmp_path: Path) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    data = [torch.full((4, 1), float(i)) for i in range(6)]
    config = TrainerConfig(max_epochs=1)
    with Session(config, model=nn.Linear(1, 1), optimizer=make, data=data, world=ALONE) as run:
        for batch in run:
            for x in run.accumulate(batch):
                run.backward(run.model(x).square().mean())
            run.step()
            if run.global_step == 2:
                checkpoint = run.save_checkpoint(tmp_path / "second")
    assert (checkpoint.step, load_weights(tmp_path / "second").keys()) == (2, {"weight", "bias"})


def _save_sharded(world: World, path: str) -> dict[str, torch.Tensor]:
    config = _config(parallel=ParallelConfig(strategy="fsdp"), micro_batch_size=4, global_batch_size=8)
    trainer = TinyTrainer(config, world=world)
    trainer.train_epoch()
    trainer.save_checkpoint(path)
    return weights(trainer)


def test_shards_of_two_ranks_make_one_checkpoint(tmp_path: Path) -> None:
    wanted, _ = run_on_ranks(_save_sharded, 2, str(tmp_path / "sharded"))
    assert _same({f"model.{name}": each for name, each in load_weights(tmp_path / "sharded").items()}, wanted)
    assert os.listdir(tmp_path) == ["sharded"]
