"""Who decays, and the optimizer made of it: the same groups for plain, wrapped, sharded and tied parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from headway.trainer import ConfigError, ParallelConfig, World, optimizers
from tests.distributed import run_on_ranks
from tests.tiny import Losses, TinyConfig, TinyTrainer, weights


class Language(nn.Module):
    """An embedding tied to the head, norms of one and two dimensions, and a bias with two."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)
        self.norm = nn.LayerNorm((3, 4))
        self.scale = nn.RMSNorm(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embedding.weight


def names_of(model: nn.Module, groups: list[dict[str, Any]]) -> dict[str, list[str]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {group["name"]: sorted(names[parameter] for parameter in group["params"]) for group in groups}


@pytest.mark.parametrize("decay_embeddings", [True, False])
def test_norms_and_biases_do_not_decay_and_a_tied_weight_is_in_one_group(decay_embeddings: bool) -> None:
    model = Language()
    groups = optimizers.decay_groups(model, 0.1, decay_embeddings=decay_embeddings)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    decay = ["attention.in_proj_weight", "attention.out_proj.weight"]
    spared = ["attention.bias_k", "attention.bias_v", "attention.in_proj_bias", "attention.out_proj.bias", "head.bias"]
    spared += ["norm.bias", "norm.weight", "scale.weight"]
    (decay if decay_embeddings else spared).append("embedding.weight")
    assert names_of(model, groups) == {"decay": sorted(decay), "no_decay": sorted(spared)}


def test_a_group_without_parameters_is_left_out_and_a_frozen_model_refused() -> None:
    assert [group["name"] for group in optimizers.decay_groups(nn.Linear(2, 2, bias=False), 0.1)] == ["decay"]
    with pytest.raises(ConfigError, match="has no trainable parameter"):
        optimizers.adamw(nn.Linear(2, 2).requires_grad_(False), 1e-3)


def test_adamw_is_fused_and_differs_by_rounding_alone() -> None:
    steps = []
    for make in (lambda model: optimizers.adamw(model, 0.1, 0.5), None):
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        if make is None:
            groups = [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.0}]
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.5)
        else:
            optimizer = make(model)
            assert optimizer.param_groups[0]["fused"] is True
        for _ in range(5):
            model(torch.ones(2, 5)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        steps.append([parameter.detach().clone() for parameter in model.parameters()])
    torch.testing.assert_close(*steps)


class Decayed(TinyTrainer):
    def configure_optimizers(self) -> None:
        self.optimizer = optimizers.adamw(self.model, self.config.learning_rate, weight_decay=0.5)


def trained(world: World, strategy: str) -> tuple[dict[str, Any], dict[str, list[str]], list[str]]:
    config = TinyConfig(
        max_steps=3,
        global_batch_size=16,
        shuffle=False,
        evaluate_every=None,
        parallel=ParallelConfig(strategy=strategy),  # type: ignore[arg-type]
    )
    losses = Losses()
    trainer = Decayed(config, world=world, callbacks=[losses])
    trainer.fit()
    groups = trainer.optimizer.param_groups
    shapes = {group["name"]: [str(tuple(each.shape)) for each in group["params"]] for group in groups}
    return weights(trainer), shapes, sorted(name for name in losses.records[3] if name.startswith("lr"))


def test_sharded_parameters_decay_as_whole_ones_and_the_log_names_the_groups() -> None:
    alone, shapes, rates = trained(World.single("cpu"), "ddp")
    assert rates == ["lr/optimizer/decay", "lr/optimizer/no_decay"]
    assert shapes["no_decay"] == ["(9,)", "(9,)", "(9,)", "(3,)"]
    for sharded, sharded_shapes, _ in run_on_ranks(trained, 2, "fsdp"):
        assert sharded_shapes == shapes
        for name, value in alone.items():
            torch.testing.assert_close(sharded[name], value, msg=name)


def test_an_optimizer_by_name_decays_as_one_that_is_made_by_hand() -> None:
    model = Language()
    plain = optimizers.named("SGD", model, lr=0.1, momentum=0.9)
    assert type(plain) is torch.optim.SGD
    assert [(len(group["params"]), group["momentum"]) for group in plain.param_groups] == [(11, 0.9)]
    by_default = optimizers.named("torch.optim.adamw.AdamW", model, lr=0.1, decay_embeddings=False)
    given = optimizers.named("SGD", model, lr=0.1, weight_decay=0.01, decay_embeddings=False)
    by_hand = optimizers.adamw(model, 0.1, decay_embeddings=False)
    for optimizer in (by_default, given):
        assert names_of(model, optimizer.param_groups) == names_of(model, by_hand.param_groups)
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("AdmW", {}, "no optimizer 'AdmW' in torch.optim; did you mean 'AdamW'"),
        ("Optimizer", {}, "no optimizer 'Optimizer'"),
        ("nowhere.at.all.Adam", {}, "nowhere.at.all cannot be imported"),
        ("SGD", {"lr": -1}, "Invalid learning rate"),
        ("SGD", {"betas": (0.9, 0.99)}, r"'betas'.* It takes lr, momentum, "),
        ("LBFGS", {}, "needs a closure"),
    ],
)
def test_what_is_no_optimizer_or_setting_is_said(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        optimizers.named(name, nn.Linear(2, 2), **settings)
