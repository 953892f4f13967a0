"""A resumed run equals an uninterrupted one: same weights, losses and rows, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headway.trainer import Callback, CheckpointConfig, DataError, Duration, ParallelConfig, World
from headway.trainer.checkpoints.export import load_weights
from tests.distributed import run_on_ranks
from tests.tiny import Losses, StopAt, TinyConfig, TinyTrainer, weights

CONFIG = TinyConfig(
    max_epochs=3,
    global_batch_size=16,
    dropout=0.3,
    noise=0.1,
    log_every="4 steps",  # type: ignore[arg-type]
    evaluate_every="5 steps",  # type: ignore[arg-type]
    checkpoint=CheckpointConfig(every=None),
    max_grad_norm=1.0,
)
STEPS = 18  # six whole batches of 16 in each of three epochs of 103 rows


def _train(world: World, run_dir: str, stops: list[int], config: TinyConfig = CONFIG) -> dict[str, Any]:
    """Train to the end, interrupted after each of the given updates, and return everything comparable."""
    records: dict[int, dict[str, float]] = {}
    seen: list[tuple[int, list[int]]] = []
    for stop in [*stops, None]:
        losses = Losses()
        callbacks = [losses] if stop is None else [losses, StopAt(stop)]
        trainer = TinyTrainer(config, run_dir=run_dir, world=world, callbacks=callbacks)
        result = trainer.fit()
        assert result.status == ("completed" if stop is None else "interrupted")
        # On several ranks a stop takes effect one update later.
        assert stop is None or trainer.global_step - stop in (0, 1)
        seen += trainer.seen
        for step, each in losses.records.items():
            records.setdefault(step, {}).update(each)
    assert trainer.global_step == STEPS
    names = ("train/loss", "train/accuracy", "validation/loss", "validation/accuracy", "lr", "grad_norm")
    return {
        "weights": weights(trainer),
        "moments": [value["exp_avg_sq"] for value in trainer.optimizer.state_dict()["state"].values()],
        "records": {step: {name: each[name] for name in names if name in each} for step, each in records.items()},
        "seen": seen,
        "epochs": result.history,
        "scheduler": trainer.scheduler.state_dict(),
    }


def _assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in one["weights"].items():
        assert torch.equal(value, other["weights"][name]), name
    for mine, theirs in zip(one["moments"], other["moments"], strict=True):
        assert torch.equal(mine, theirs)
    for key in ("seen", "epochs", "scheduler"):
        assert one[key] == other[key], key
    # An interruption adds a record of the partial interval; it removes none.
    for step, record in other["records"].items():
        assert {name: one["records"][step].get(name) for name in record} == record, step
    assert len(other["records"]) >= 6


@pytest.mark.parametrize("stops", [[7], [8], [3, 5], [6], [1, 2, 17]], ids=str)
def test_one_process(tmp_path: Path, stops: list[int]) -> None:
    world = World.single("cpu")
    reference = _train(world, str(tmp_path / "reference"), [])
    interrupted = _train(world, str(tmp_path / "interrupted"), stops)
    _assert_equal(interrupted, reference)
    for epoch in range(3):
        ids = [row for step, rows in interrupted["seen"] if step // 6 == epoch for row in rows]
        assert len(ids) == len(set(ids)) == 96
    assert len({tuple(rows) for _, rows in interrupted["seen"]}) == STEPS * 2, "epochs are shuffled differently"


def _two_ranks(world: World, folder: str, strategy: str) -> dict[str, Any]:
    config = TinyConfig(**{**vars(CONFIG), "parallel": ParallelConfig(strategy=strategy)})  # type: ignore[arg-type]
    reference = _train(world, f"{folder}/reference", [], config)
    interrupted = _train(world, f"{folder}/interrupted", [7, 9], config)
    _assert_equal({**interrupted, "moments": []}, {**reference, "moments": []})
    return {"seen": interrupted["seen"], "weights": interrupted["weights"]}


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.extended)])
def test_two_ranks_each_with_its_own_random_numbers(tmp_path: Path, strategy: str) -> None:
    ranks = run_on_ranks(_two_ranks, 2, str(tmp_path), strategy)
    for name, value in ranks[0]["weights"].items():
        assert torch.equal(value, ranks[1]["weights"][name])
    ids = [row for rank in ranks for step, rows in rank["seen"] if step < 6 for row in rows]
    assert len(ids) == len(set(ids)) == 96


def _three_ranks(world: World, folder: str) -> None:
    config = TinyConfig(**{**vars(CONFIG), "global_batch_size": 15, "parallel": ParallelConfig(strategy="ddp")})
    reference = _train(world, f"{folder}/reference", [], config)
    _assert_equal(_train(world, f"{folder}/interrupted", [7, 9], config), reference)


def test_three_ranks_whose_sums_depend_on_the_order_of_buckets(tmp_path: Path) -> None:
    run_on_ranks(_three_ranks, 3, str(tmp_path))


def test_worker_processes_augment_by_the_row(tmp_path: Path) -> None:
    """The random numbers of a row depend only on (seed, epoch, row), so loader workers need no state to resume."""
    world = World.single("cpu")
    config = TinyConfig(**{**vars(CONFIG), "num_workers": 1, "max_epochs": None, "max_steps": 8})
    results = {}
    for name, stops in {"reference": [], "interrupted": [4]}.items():
        for stop in [*stops, None]:
            callbacks = [] if stop is None else [StopAt(stop)]
            trainer = TinyTrainer(config, run_dir=tmp_path / name, world=world, callbacks=callbacks)
            trainer.fit()
        results[name] = weights(trainer)
    for name, value in results["reference"].items():
        assert torch.equal(value, results["interrupted"][name]), name


def test_limits_are_totals(tmp_path: Path) -> None:
    world = World.single("cpu")

    def fit(max_epochs: int) -> TinyTrainer:
        trainer = TinyTrainer(TinyConfig(**{**vars(CONFIG), "max_epochs": max_epochs}), run_dir=tmp_path, world=world)
        assert trainer.fit().status == "completed"
        return trainer

    assert len({step for step, _ in fit(1).seen}) == 6
    before = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    again = fit(1)
    assert again.seen == []
    assert again.progress.epoch == 1
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == before
    assert {step for step, _ in fit(3).seen} == set(range(6, 18))


def test_changed_data_is_refused(tmp_path: Path) -> None:
    world = World.single("cpu")
    TinyTrainer(TinyConfig(**{**vars(CONFIG), "max_epochs": 1}), run_dir=tmp_path, world=world).fit()
    other = TinyTrainer(TinyConfig(**{**vars(CONFIG), "num_rows": 104}), run_dir=tmp_path, world=world)
    with pytest.raises(DataError, match=r"Rows\[103\] and is Rows\[104\]"):
        other.fit()


class _Normalised(TinyTrainer):
    def configure_models(self) -> None:
        super().configure_models()
        self.model.first = torch.nn.Sequential(self.model.first, torch.nn.BatchNorm1d(self.config.width))

    def configure_dataloaders(self) -> Any:
        return super().configure_dataloaders()[0]


class _OfRank(Callback):
    """Has a state that differs between ranks, although it is declared shared."""

    def __init__(self, rank: int) -> None:
        self.both = [torch.full((2,), float(rank)), torch.full((3,), float(rank))]

    def state_dict(self) -> dict[str, Any]:
        return {"both": self.both}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.both = state["both"]


def _running_statistics(world: World, folder: str) -> None:
    every = CheckpointConfig(every=Duration(3, "steps"), keep_last="all")
    config = TinyConfig(max_steps=6, batch_size=4, checkpoint=every)
    reference = _Normalised(config, run_dir=f"{folder}/a", world=world, callbacks=[_OfRank(world.rank)])
    reference.fit()
    own = reference.model.module.first[1].running_mean
    others = world.all_gather_object(own)
    assert not torch.equal(others[0], others[1]), "the next forward pass gives all ranks those of the main one"
    callback = _OfRank(world.rank)
    resumed = _Normalised(config, run_dir=f"{folder}/b", world=world, callbacks=[callback])
    # Saved in the background and, at the end, synchronously.
    resumed.fit(resume=f"{folder}/a/checkpoints/step-00000003")
    for name, value in weights(reference).items():
        assert torch.equal(value, weights(resumed)[name]), name
    assert [value.tolist() for value in callback.both] == [[0.0] * 2, [0.0] * 3]
    if world.is_main:
        for path, trainer in (("a", reference), ("b", resumed)):
            saved = load_weights(f"{folder}/{path}/checkpoints/step-00000006")
            for name, value in trainer.model.module.state_dict().items():
                assert torch.equal(value, saved[name]), name


def test_what_ranks_change_by_themselves_is_saved_as_the_main_rank_has_it(tmp_path: Path) -> None:
    run_on_ranks(_running_statistics, 2, str(tmp_path))
