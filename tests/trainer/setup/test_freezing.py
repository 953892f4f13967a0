"""Frozen parameters get no gradient, and modules that the config freezes stay in evaluation mode."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headway.trainer import Callback, ConfigError, ParallelConfig, World
from headway.trainer.checkpoints.model_state import ModelModes
from headway.trainer.distributed.dtensor import to_local
from headway.trainer.setup.freezing import freeze
from tests.distributed import run_on_ranks
from tests.tiny import Deep, StopAt, TinyConfig, TinyTrainer, weights

ALONE = World.single("cpu")


def _frozen(*patterns: str) -> list[str]:
    model = Deep(4, 0.5)
    freeze({"model": model}, patterns)
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


@pytest.mark.parametrize(
    ("patterns", "frozen"),
    [
        ((), []),
        (("model.first.*",), ["first.weight", "first.bias"]),
        (("model.blocks.1.*",), ["blocks.1.0.weight", "blocks.1.0.bias"]),
        (("model.blocks.[01].*.bias", "model.last.bias"), ["blocks.0.0.bias", "blocks.1.0.bias", "last.bias"]),
        (("*", "!model.last.*", "model.last.bias"), [
            "first.weight", "first.bias", "blocks.0.0.weight", "blocks.0.0.bias", "blocks.1.0.weight",
            "blocks.1.0.bias", "last.bias",
        ]),
    ],
)  # fmt: skip
def test_a_pattern_freezes_the_parameters_of_that_name(patterns: tuple[str, ...], frozen: list[str]) -> None:
    assert _frozen(*patterns) == frozen


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (
            ("model.frist.*",),
            "'model.frist.*' matches no parameter; patterns match whole names, such as model.first.bi",
        ),
        (
            ("model.blocks.1",),
            r"'model.blocks.1' matches no .*, such as model.blocks.1.0.weight, model.blocks.1.0.bias",
        ),
        (("weight",), "such as model.first.weight, model.blocks.0.0.weight"),
        (("*",), 'leaves nothing to train: remove a pattern, or unfreeze parameters with one that begins with "!"'),
    ],
)
def test_a_pattern_that_matches_nothing_and_one_that_leaves_nothing_are_refused(
    patterns: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        _frozen(*patterns)


def test_a_tied_weight_is_frozen_by_each_of_its_names() -> None:
    model = nn.ModuleDict({"tokens": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False), "norm": nn.LayerNorm(3)})
    model["head"].weight = model["tokens"].weight
    freeze({"model": model}, ["model.head.*"])
    assert not model["tokens"].weight.requires_grad


class Normed(nn.Module):
    """A body with running means and dropout, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class Finetunes(TinyTrainer):
    def configure_models(self) -> None:
        self.model = Normed()
        self.target = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5)).requires_grad_(False)
        self.teacher = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5)).requires_grad_(False).eval()

    def configure_optimizers(self) -> None:
        # All of them: what is frozen gets no gradient, and no moments.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.teacher(batch["x"])
        return super().training_step(batch, batch_idx)


class Modes(Callback):
    """Records the modules in training mode, before every step."""

    def __init__(self) -> None:
        self.modes: list[tuple[bool, ...]] = []

    def on_step_start(self, trainer: Any) -> None:
        body, head = trainer.unwrap(trainer.model).body, trainer.unwrap(trainer.model).head
        modules = (body, body[1], body[2], head, trainer.teacher, trainer.target)
        self.modes.append(tuple(each.training for each in modules))


def _finetune(world: World, strategies: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for strategy in strategies:
        modes = Modes()
        config = TinyConfig(
            max_steps=4, evaluate_every="2 steps", freeze=("model.body.*",),  # type: ignore[arg-type]
            shuffle=False, global_batch_size=8, batch_size=8, parallel=ParallelConfig(strategy=strategy),  # type: ignore[arg-type]
        )  # fmt: skip
        trainer = Finetunes(config, world=world, callbacks=[modes])
        trainer.setup()
        before = weights(trainer)
        trainer.fit()
        after = weights(trainer)
        found[strategy] = {
            "modes": set(modes.modes),
            "changed": sorted(name for name in after if not torch.equal(before[name], after[name])),
            "after": after,
            "states": len(trainer.optimizer.state),
            "gradients": sum(
                to_local(parameter).numel() for parameter in trainer.model.parameters() if parameter.requires_grad
            ),
        }
    return found


def test_frozen_modules_stay_as_they_are_and_in_evaluation_mode_unless_the_user_froze_them() -> None:
    """Also after an evaluation, which puts all modules in evaluation mode and back.

    A target network that is frozen by its own code keeps its dropout and batch statistics, as in plain PyTorch.
    """
    alone = _finetune(ALONE, ("none",))["none"]
    assert alone["modes"] == {(False, False, False, True, False, True)}
    assert alone["changed"] == ["model.head.bias", "model.head.weight"]
    assert alone["states"] == 2
    for rank in run_on_ranks(_finetune, 2, ("ddp", "fsdp")):
        for found in rank.values():
            assert found["modes"] == alone["modes"]
            assert found["changed"] == alone["changed"]
            assert found["states"] == 2
            for name, value in alone["after"].items():
                torch.testing.assert_close(found["after"][name], value)


class Thaws(TinyTrainer):
    """Trains the first layer from the third update on, and then leaves dropout out."""

    def configure_models(self) -> None:
        super().configure_models()
        self.model.first.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.training and self.global_step == 2:
            self.model.first.requires_grad_(True)
            self.model.dropout.eval()
        return super().training_step(batch, batch_idx)


class SavesInEvaluation(Callback):
    """Writes a checkpoint when all modules are in evaluation mode."""

    def on_evaluation_end(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        trainer.save_checkpoint()


def _thaw(world: World, folder: str, strategy: str) -> list[dict[str, torch.Tensor]]:
    config = TinyConfig(
        num_rows=32, dropout=0.5, max_steps=6, evaluate_every="2 steps", parallel=ParallelConfig(strategy=strategy)
    )
    found = []
    for name, callbacks in {
        "straight": [[]],
        "resumed": [[StopAt(4)], []],
        "in evaluation": [[SavesInEvaluation(), StopAt(4)], []],
    }.items():
        for each in callbacks:
            trainer = Thaws(config, run_dir=f"{folder}/{name}", world=world, callbacks=each)
            trainer.fit()
        found.append(weights(trainer))
    return found


@pytest.mark.parametrize("strategy", ["none", "ddp", pytest.param("fsdp", marks=pytest.mark.extended)])
def test_what_a_run_has_unfrozen_is_unfrozen_when_it_resumes(tmp_path: Path, strategy: str) -> None:
    ranks = [_thaw(ALONE, str(tmp_path), "none")] if strategy == "none" else run_on_ranks(_thaw, 2, tmp_path, strategy)
    for straight, *resumed in ranks:
        for each in resumed:
            assert [name for name in straight if not torch.equal(straight[name], each[name])] == []


def test_an_earlier_state_sets_back_what_has_been_unfrozen_since() -> None:
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Dropout())
    modes = ModelModes({"model": model}, dict)
    before = modes.state_dict()
    model.requires_grad_(True).eval()
    assert modes.state_dict() == {
        "trains": {"model.0.weight": True, "model.0.bias": True},
        "training": {"model": False, "model.0": False, "model.1": False},
    }
    modes.load_state_dict(before)
    assert [each.requires_grad for each in model.parameters()] == [False, False]
    assert [each.training for each in model.modules()] == [True] * 3


def test_a_layer_may_join_the_optimizer_in_the_first_update() -> None:
    class Joins(TinyTrainer):
        def configure_optimizers(self) -> None:
            self.optimizer = torch.optim.SGD(self.model.last.parameters(), lr=0.1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.training and len(self.optimizer.param_groups) == 1:
                self.optimizer.add_param_group({"params": list(self.model.first.parameters())})
            return super().training_step(batch, batch_idx)

    trainer = Joins(TinyConfig(max_steps=2), world=ALONE)
    with pytest.warns(UserWarning, match="and 5 more can be trained, but no optimizer has it"):
        trainer.setup()
    before = weights(trainer)
    trainer.fit()
    changed = {name for name, value in weights(trainer).items() if not torch.equal(before[name], value)}
    assert changed == {f"model.{layer}.{kind}" for layer in ("first", "last") for kind in ("weight", "bias")}


class _KeepsNorm(nn.Module):
    """Keeps a norm in evaluation mode by its `train`, as detectors do with that of a pretrained backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def train(self, mode: bool = True) -> _KeepsNorm:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(x))


def test_a_module_that_chooses_the_modes_of_its_parts_is_asked_before_training() -> None:
    """A loop written by hand calls `model.train()` before each epoch."""

    class Keeps(TinyTrainer):
        def configure_models(self) -> None:
            self.model = _KeepsNorm()
            self.other = _KeepsNorm().eval().requires_grad_(False)

    trainer = Keeps(TinyConfig(max_steps=3), world=World.single("cpu"))
    trainer.fit()
    assert torch.equal(trainer.model.norm.running_mean, torch.zeros(6))
    assert (trainer.model.training, trainer.model.norm.training, trainer.other.training) == (True, False, False)
