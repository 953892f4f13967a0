"""Checks before the first update: the ranks agree, and every weight has a value."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from headway.trainer import CheckpointConfig, ConfigError, World
from headway.trainer.setup.rank_consistency import check_agreement
from tests.distributed import run_on_ranks
from tests.tiny import Rows, TinyConfig, TinyTrainer

ALONE = World.single("cpu")


class OtherModel(TinyTrainer):
    def configure_models(self) -> None:
        super().configure_models()
        if self.world.rank == 1:
            self.model.last = nn.Linear(self.config.width, 4)


class OtherData(TinyTrainer):
    def configure_dataloaders(self) -> Any:
        return DataLoader(Rows(32 + self.world.rank), batch_size=4), None


def _of_another_version(rank: int) -> type[TinyTrainer]:
    """A class as in an old copy of its file, on one rank."""
    scope: dict[str, Any] = {"TinyTrainer": TinyTrainer, "__name__": "edited"}
    loss = "outputs" if rank == 0 else "{**outputs, 'loss': outputs['loss'] * 2}"
    source = (
        "class Edited(TinyTrainer):\n"
        "    def training_step(self, batch, batch_idx):\n"
        f"        outputs = super().training_step(batch, batch_idx)\n        return {loss}\n"
        "    def same(self):\n        return [each in {'a', 'b', 'c'} for each in 'abc']\n"
    )
    exec(compile("\n" * rank + source, f"/on/machine/{rank}.py", "exec"), scope)
    edited: type[TinyTrainer] = scope["Edited"]
    return edited


class OldModule(TinyTrainer):
    """Has a layer whose file is an old one on one rank."""

    def configure_models(self) -> None:
        super().configure_models()
        scope: dict[str, Any] = {"nn": nn, "__name__": "layers"}
        exec(
            "class Scaled(nn.Linear):\n    def forward(self, x):\n"
            f"        return super().forward(x) * {1 + (self.world.rank == 1)}\n",
            scope,
        )
        self.model.last = scope["Scaled"](self.config.width, 3)


def _on_ranks(world: World) -> list[str]:
    said = []
    config = TinyConfig(max_epochs=1)
    other = TinyConfig(max_epochs=1, learning_rate=0.01 + world.rank, seed=world.rank)
    for trainer in (
        TinyTrainer(other, world=world),
        OtherModel(config, world=world),
        OtherData(config, world=world),
        _of_another_version(world.rank)(config, world=world),
        OldModule(config, world=world),
    ):
        with pytest.raises(ConfigError, match="the ranks differ in what they would train") as raised:
            trainer.fit()
        assert trainer.global_step == 0
        said.append(str(raised.value))
    check_agreement(world, {"same": {"object": object(), "list": [1, 2]}})
    with pytest.raises(ConfigError) as raised:
        check_agreement(world, {str(number): world.rank for number in range(12)})
    return [*said, str(raised.value)]


def test_ranks_that_differ_are_named_with_what_differs() -> None:
    found = run_on_ranks(_on_ranks, 3)
    assert found[0] == found[1] == found[2]
    config, model, data, code, module, many = found[0]
    assert [line.split(":")[0].strip() for line in module.splitlines()[1:]] == ["code.layers.Scaled"]
    assert " on ranks 0, 2, " in module
    # The ranks' copies of the file differ only in this method; their location does not matter.
    assert [line.split(":")[0].strip() for line in code.splitlines()[1:]] == ["code.training_step"]
    assert " on rank 0, " in code
    assert " on ranks 1, 2" in code
    assert "config.learning_rate: 0.01 on rank 0, 1.01 on rank 1, 2.01 on rank 2" in config
    assert "config.seed: 0 on rank 0" in config
    assert "models.model.last.bias: [3] float32 on ranks 0, 2, [4] float32 on rank 1" in model
    assert "data: [('exact', 'Rows[32]', 3)] on rank 0, [('exact', 'Rows[33]', 3)] on rank 1" in data
    assert many.endswith("and 4 more")


class Wide(TinyTrainer):
    """Has so many parameters that what describes each of them is large."""

    def configure_models(self) -> None:
        super().configure_models()
        self.model.extra = nn.ParameterList(nn.Parameter(torch.empty(1)) for _ in range(200))

    def init_weights(self) -> None:
        super().init_weights()
        for parameter in self.model.extra:
            nn.init.zeros_(parameter)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        return {**outputs, "loss": outputs["loss"] + sum(self.model.extra).sum()}


def _sent(world: World, folder: str) -> int:
    """Return the bytes that this rank sends to all others while it sets up, and saves twice."""
    sent = 0

    def all_gather_object(values: list[Any], value: Any, **options: Any) -> None:
        nonlocal sent
        sent += len(pickle.dumps(value))
        gather(values, value, **options)

    gather, dist.all_gather_object = dist.all_gather_object, all_gather_object
    try:
        config = TinyConfig(max_steps=2, evaluate_every=None, checkpoint=CheckpointConfig(every="1 steps"))
        Wide(config, world=world, run_dir=folder).fit()
    finally:
        dist.all_gather_object = gather
    return sent


def test_what_only_the_main_rank_needs_is_not_sent_to_all(tmp_path: Path) -> None:
    assert max(run_on_ranks(_sent, 2, str(tmp_path))) < 4096


def test_a_weight_that_is_not_finite_is_named() -> None:
    class Broken(TinyTrainer):
        def init_weights(self) -> None:
            super().init_weights()
            with torch.no_grad():
                self.model.last.bias[1] = -float("inf")
                self.model.first.weight.fill_(float("inf"))

    with pytest.raises(ConfigError, match="are not finite: model.first.weight, model.last.bias. Check init_weights"):
        Broken(TinyConfig(max_epochs=1), world=ALONE).fit()


def test_a_mask_of_infinities_is_no_mistake() -> None:
    class Masked(TinyTrainer):
        def configure_models(self) -> None:
            super().configure_models()
            self.model.register_buffer("mask", torch.empty(3))

        def init_weights(self) -> None:
            super().init_weights()
            self.model.mask.fill_(-float("inf"))

    assert Masked(TinyConfig(max_steps=1), world=ALONE).fit().steps == 1
