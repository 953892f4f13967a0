"""An update that runs out of memory is repeated with smaller micro-batches, with equal results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headway.trainer import (
    Callback,
    CheckpointConfig,
    ConfigError,
    ParallelConfig,
    Trainer,
    TrainerConfig,
    World,
    read_history,
)
from headway.trainer.errors import StepError
from tests.distributed import run_on_ranks
from tests.tiny import Deep, Losses, StopAt, TinyConfig, TinyTrainer, weights

ALONE = World.single("cpu")


class Normed(nn.Module):
    """Has buffers that every forward pass changes."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.deep = Deep(width, dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.deep(self.norm(x))


class Cramped(TinyTrainer):
    """Runs out of memory above so many rows: in the second micro-batch of an update, after its forward pass."""

    room, ranks = 2, (0, 1)

    def configure_models(self) -> None:
        self.model = Normed(self.config.width, self.config.dropout)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        self.log("logged", 1.0, reduce="sum")
        if self.training and self.world.rank in self.ranks and len(batch["x"]) > self.room and batch_idx % 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return outputs


class Told(Callback):
    """Records out-of-memory messages, and the number of attempts at an update."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.begun = 0

    def on_step_start(self, trainer: Trainer[Any]) -> None:
        self.begun += 1

    def on_out_of_memory(self, trainer: Trainer[Any], reason: str) -> None:
        self.reasons.append(reason)


def config(**changes: Any) -> TinyConfig:
    return TinyConfig(
        **{
            "num_rows": 64,
            "max_epochs": 2,
            "global_batch_size": 32,
            "micro_batch_size": 8,
            "dropout": 0.2,
            "noise": 0.1,
            "log_every": "1 steps",
            "halve_on_out_of_memory": True,
            "checkpoint": CheckpointConfig(every=None),
            **changes,
        }
    )


def records_of(told: Losses) -> dict[str, dict[int, float]]:
    return {name: told.of(name) for name in ("train/loss", "train/logged", "grad_norm")}


def outcome(world: World, *, room: int, micro_batch_size: int, ranks: tuple[int, ...] = (0, 1)) -> dict[str, Any]:
    cls = type("Roomy", (Cramped,), {"room": room, "ranks": ranks})
    losses, told, said = Losses(), Told(), list[str]()
    trainer = cls(config(micro_batch_size=micro_batch_size), world=world, callbacks=[losses, told], printer=said.append)
    trainer.fit()
    return {
        "weights": weights(trainer),
        "records": records_of(losses),
        "pieces": losses.of("micro_batch_pieces"),
        "begun": told.begun,
        "reasons": told.reasons,
        "said": said,
        "micro_batches": trainer.micro_batches_seen,
    }


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["records"] == other["records"] and all(
        torch.equal(value, other["weights"][name]) for name, value in one["weights"].items()
    )


def test_the_update_is_what_it_would_have_been_in_smaller_micro_batches() -> None:
    """Bitwise, with dropout, noise, running statistics and logged values."""
    halved = outcome(ALONE, room=2, micro_batch_size=8)
    assert len(halved["records"]["train/loss"]) == 4
    assert len(halved["reasons"]) == 2  # 8 -> 4 -> 2
    assert halved["said"] == halved["reasons"]
    assert "rank 0 ran out of memory at step 1 with up to 8 samples" in halved["reasons"][0]
    assert "with up to 2, also in later updates (set micro_batch_size=2" in halved["reasons"][1]
    assert halved["begun"] == 4
    assert set(halved["pieces"].values()) == {4.0}
    small = outcome(ALONE, room=2, micro_batch_size=2)
    assert (small["reasons"], small["pieces"]) == ([], {})
    assert equal(halved, small)
    assert halved["micro_batches"] == small["micro_batches"] == 64
    assert not equal(halved, outcome(ALONE, room=8, micro_batch_size=8))  # or the test would see nothing


def test_a_resumed_run_stays_with_it_unless_the_micro_batch_is_another_one(tmp_path: Path) -> None:
    told = Told()
    Cramped(config(), run_dir=tmp_path, world=ALONE, callbacks=[StopAt(3), told]).fit()
    assert len(told.reasons) == 2
    losses, told = Losses(), Told()
    resumed = Cramped(config(), run_dir=tmp_path, world=ALONE, callbacks=[losses, told])
    resumed.fit()
    assert told.reasons == []
    assert losses.of("micro_batch_pieces") == {4: 4.0}
    assert equal(
        {"weights": weights(resumed), "records": {}},
        {"weights": outcome(ALONE, room=2, micro_batch_size=8)["weights"], "records": {}},
    )
    assert len(read_history(tmp_path / "metrics.jsonl")) == 2
    losses = Losses()
    Cramped(config(max_epochs=3, micro_batch_size=2), run_dir=tmp_path, world=ALONE, callbacks=[losses]).fit()
    assert sorted(losses.of("train/loss")) == [5, 6]
    assert losses.of("micro_batch_pieces") == {}


class Whole(Cramped):
    """Its data has batches of 8 rows."""

    def configure_dataloaders(self) -> Any:
        train, validation = super().configure_dataloaders()
        return list(train), validation


def test_batches_of_an_iterable_are_cut_as_well() -> None:
    told = Told()
    changes = {"global_batch_size": None, "micro_batch_size": None, "gradient_accumulation_steps": 2, "noise": 0.0}
    trainer = Whole(config(**changes), world=ALONE, callbacks=[told])
    assert trainer.fit().steps == 8
    assert len(told.reasons) == 2
    assert all(len(ids) <= 2 for _, ids in trainer.seen[-8:])
    assert sorted(row for _, ids in trainer.seen[-32:] for row in ids) == list(range(64))


class NeverFits(Cramped):
    room = 0

    def configure_models(self) -> None:
        TinyTrainer.configure_models(self)


class Named(Cramped):
    def configure_dataloaders(self) -> Any:
        train, validation = super().configure_dataloaders()
        return [{**batch, "name": [f"row {row}" for row in batch["id"]]} for batch in train], validation


class StepsItself(Cramped):
    """Its second optimizer steps after the first."""

    def configure_optimizers(self) -> None:
        super().configure_optimizers()
        self.other = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = TinyTrainer.training_step(self, batch, batch_idx)["loss"]
        if self.training:
            self.backward(loss)
            if self.step(self.optimizer) is not None:
                raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize(
    ("cls", "note"),
    [
        (NeverFits, "micro-batches already have only one sample"),
        (Named, "in addition to tensors it has a list of 8 elements"),
        (StepsItself, "an optimizer has already stepped in it"),
    ],
)
def test_where_it_does_not_help_the_error_is_that_of_the_step(cls: type[TinyTrainer], note: str) -> None:
    changes: dict[str, Any] = {"global_batch_size": None, "micro_batch_size": None} if cls is Named else {}
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as raised:
        cls(config(max_steps=1, gradient_accumulation_steps=2 if changes else 1, **changes), world=ALONE).fit()
    assert any(note in each for each in raised.value.__notes__)
    assert any("Settings: " in each for each in raised.value.__notes__)


def test_without_the_option_it_ends_the_run() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        Cramped(config(halve_on_out_of_memory=False), world=ALONE).fit()


@contextlib.contextmanager
def refused(error: type[Exception], match: str) -> Iterator[None]:
    with pytest.raises(error, match=match):
        yield


def on_rank(world: World) -> list[dict[str, Any]]:
    """One rank has too little memory, then too little for a single row, then sharded models."""
    halved = outcome(world, room=2, micro_batch_size=8, ranks=(1,))
    small = outcome(world, room=2, micro_batch_size=2, ranks=(1,))
    with refused(*((torch.OutOfMemoryError, "CUDA") if world.rank == 1 else (StepError, "rank 1 ran out of memory"))):
        type("Never", (NeverFits,), {"ranks": (1,)})(config(), world=world).fit()
    with refused(ConfigError, r"sharded models \(model\)"):
        TinyTrainer(config(parallel=ParallelConfig(strategy="fsdp")), world=world).fit()
    return [halved, small]


class CrampedPair(TinyTrainer):
    """Runs out of memory between the first forward passes of its two models, both of which have buffers."""

    def configure_models(self) -> None:
        self.model = Normed(self.config.width, self.config.dropout)
        self.critic = Normed(self.config.width, self.config.dropout)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD([*self.model.parameters(), *self.critic.parameters()], lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        if self.training and self.world.rank == 1 and len(batch["x"]) > 2 and batch_idx % 2 == 0:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return outputs["loss"] + self.critic(batch["x"]).square().mean()


def pair_on_rank(world: World) -> tuple[bool, list[bool]]:
    trainers = []
    for micro_batch_size in (8, 2):
        trainer = CrampedPair(config(micro_batch_size=micro_batch_size, max_epochs=1), world=world)
        trainer.fit()
        trainers.append(weights(trainer))
    halved, small = trainers
    return len(halved) > 20, [torch.equal(halved[name], value) for name, value in small.items()]


@pytest.mark.extended
def test_a_rank_that_runs_out_of_memory_between_two_models_finds_the_others() -> None:
    for has_all, equals in run_on_ranks(pair_on_rank, 2):
        assert has_all
        assert all(equals)


def test_all_ranks_halve_when_one_runs_out_of_memory() -> None:
    ranks = run_on_ranks(on_rank, 2)
    for halved, small in ranks:
        assert len(halved["reasons"]) == 2
        assert "rank 1 ran out of memory" in halved["reasons"][0]
        assert small["reasons"] == []
        assert equal(halved, small)
        assert halved["records"] == ranks[0][0]["records"]
        for name, value in halved["weights"].items():
            # Running statistics are those of each rank until the next forward pass, as under DDP.
            assert "running" in name or torch.equal(value, ranks[0][0]["weights"][name])
    for (halved, _), by_ddp in zip(ranks, run_on_ranks(without, 2), strict=True):
        assert by_ddp["records"]["train/loss"] == pytest.approx(halved["records"]["train/loss"], rel=1e-5)
        for name, value in by_ddp["weights"].items():
            torch.testing.assert_close(halved["weights"][name], value)


def without(world: World) -> dict[str, Any]:
    """The result of plain DDP."""
    losses = Losses()
    trainer = Cramped(config(micro_batch_size=2, halve_on_out_of_memory=False), world=world, callbacks=[losses])
    trainer.fit()
    return {"weights": weights(trainer), "records": records_of(losses)}


def test_exact_mode_refuses_it() -> None:
    class Plain(TinyTrainer):
        pass

    with pytest.raises(ConfigError, match="remove halve_on_out_of_memory"):
        Plain(config(exact=True), world=ALONE).fit()
    assert TrainerConfig(max_steps=1).halve_on_out_of_memory is False


class PreparesMuch(TinyTrainer):
    """Runs out of memory above so many rows while it prepares a batch, such as by augmentation on the device."""

    def prepare_batch(self, batch: Any) -> Any:
        if self.training and self.world.rank == self.world.size - 1 and len(batch["x"]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return batch


def prepares_much(world: World) -> tuple[int, dict[str, torch.Tensor]]:
    told = Told()
    trainer = PreparesMuch(config(max_epochs=1), world=world, callbacks=[told])
    trainer.fit()
    return len(told.reasons), weights(trainer)


@pytest.mark.extended
def test_memory_that_runs_out_while_a_batch_is_prepared_is_handled_too() -> None:
    assert prepares_much(ALONE)[0] == 2  # 8 -> 4 -> 2
    (first, of_first), (second, of_second) = run_on_ranks(prepares_much, 2)
    assert first == second == 2
    for name, value in of_first.items():
        assert torch.equal(value, of_second[name]), name


def lacks_room_for_the_reduction(world: World) -> int:
    told, allocate, calls = Told(), World.reserve_for_mean, 0

    def reserve(self: World, tensors: Any) -> None:
        nonlocal calls
        calls += 1
        if world.rank == 1 and calls == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        allocate(self, tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "reserve_for_mean", reserve)
        TinyTrainer(config(max_epochs=1), world=world, callbacks=[told]).fit()
    return len(told.reasons)


def test_memory_for_the_reduction_is_reserved_before_any_rank_waits_in_it() -> None:
    assert run_on_ranks(lacks_room_for_the_reduction, 2) == [1, 1]
