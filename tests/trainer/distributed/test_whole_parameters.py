"""Models with parameters that FSDP2 cannot shard, or that some ranks do not use, train as they do under DDP."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from headway.trainer import ConfigError, StepError, World, optimizers
from headway.trainer.distributed.dtensor import unwrap
from tests.distributed import run_on_ranks
from tests.tiny import StopAt, TinyTrainer, weights
from tests.trainer.distributed.test_parallelize import _config

ALONE = World.single("cpu")


class Scaled(nn.Module):
    """A learned scalar, as CLIP's temperature; an empty parameter, as `cls_token` of vit-pytorch; a module with two
    dtypes; and a block with its own scalar.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.filter = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        self.token = nn.Parameter(torch.ones(0, 6))
        self.blocks = nn.ModuleList(Gated() for _ in range(2))
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.fft.irfft(torch.fft.rfft(torch.cat([self.token, x])) * self.filter, n=6)
        for block in self.blocks:
            x = block(x)
        return self.last(x) * self.scale.exp()


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(6, 6), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gate * self.linear(x)


class Trains(TinyTrainer):
    def configure_models(self) -> None:
        self.model = Scaled()

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)


class TrainsFused(Trains):
    def configure_optimizers(self) -> None:
        matrices = [each for each in self.model.parameters() if each.is_floating_point()]
        self.optimizer = torch.optim.AdamW(matrices, lr=0.01, fused=True)


def _train(trainer: Any) -> dict[str, Any]:
    trainer.setup()
    kinds = {name: isinstance(each, DTensor) for name, each in unwrap(trainer.model).named_parameters()}
    result = trainer.fit()
    return {"weights": weights(trainer), "norm": result.metrics["grad_norm"], "sharded": kinds}


def _train_scaled(world: World) -> dict[str, Any]:
    found = {name: _train(Trains(_config(strategy=name), world=world)) for name in ("ddp", "fsdp")}
    found["offloaded"] = _train(Trains(_config(strategy="fsdp", cpu_offload=True), world=world))
    with pytest.raises(ConfigError, match=r"self\.optimizer has fused=True, which torch does not support for divided"):
        TrainsFused(_config(strategy="fsdp"), world=world).setup()
    return found


def test_parameters_that_fsdp_cannot_shard_stay_whole_and_are_trained() -> None:
    for rank in run_on_ranks(_train_scaled, 2):
        whole = {name for name, is_sharded in rank["fsdp"]["sharded"].items() if not is_sharded}
        assert whole == {"scale", "filter", "token", "blocks.0.gate", "blocks.1.gate"}
        for name in ("fsdp", "offloaded"):
            torch.testing.assert_close(rank[name]["weights"], rank["ddp"]["weights"], atol=1e-6, rtol=1e-5)
            assert rank[name]["norm"] == pytest.approx(rank["ddp"]["norm"], rel=1e-5)


class Experts(nn.Module):
    """Each rank uses another expert; from a step on, if `first` is given."""

    def __init__(self, rank: int, first: int) -> None:
        super().__init__()
        self.experts = nn.ParameterList(nn.Parameter(torch.ones(6, 3)) for _ in range(2))
        self.rank, self.first, self.calls = rank, first, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        used = [self.rank] if self.calls >= self.first else [0, 1]
        self.calls += self.training
        return torch.stack([x @ self.experts[i] for i in used]).sum(0)


class Mixture(TinyTrainer):
    first = 0

    def configure_models(self) -> None:
        self.model = Experts(self.world.rank, self.first)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)


class LaterMixture(Mixture):
    first = 1


def _train_experts(world: World) -> dict[str, Any]:
    found = {}
    for name in ("ddp", "fsdp"):
        config = _config(strategy=name, find_unused_parameters=True)
        found[name] = weights_of(Mixture(config, world=world))
        found[f"{name} later"] = weights_of(LaterMixture(config, world=world))
    found["fsdp later, by itself"] = weights_of(LaterMixture(_config(strategy="fsdp"), world=world))
    with pytest.raises(StepError, match=r"model\.experts\.0, model\.experts\.1 got no gradient on some ranks"):
        Mixture(_config(strategy="fsdp"), world=world).fit()
    return found


def weights_of(trainer: TinyTrainer) -> dict[str, Any]:
    trainer.fit()
    return weights(trainer)


def test_ranks_may_use_different_parameters_of_a_sharded_model() -> None:
    for rank in run_on_ranks(_train_experts, 2):
        torch.testing.assert_close(rank["fsdp"], rank["ddp"])
        torch.testing.assert_close(rank["fsdp later"], rank["ddp later"])
        torch.testing.assert_close(rank["fsdp later, by itself"], rank["ddp later"])


class Positions(nn.Module):
    """The positional encoding of many tutorials: its dimension of size 1 has an unusual stride."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pe", torch.arange(8.0)[:, None].repeat(1, 6).unsqueeze(0).transpose(0, 1))
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x + self.pe[0, 0])


class Positioned(TinyTrainer):
    def configure_models(self) -> None:
        self.model = Positions()


class Sparse(TinyTrainer):
    def configure_models(self) -> None:
        self.model = nn.Sequential(nn.EmbeddingBag(9, 6, sparse=True), nn.Linear(6, 3))


def _train_the_rest(world: World) -> torch.Tensor:
    with pytest.raises(ConfigError, match=r"0 is an EmbeddingBag with sparse=True, and FSDP2 reduces no sparse"):
        Sparse(_config(strategy="fsdp"), world=world).setup()
    trainer = Positioned(_config(), world=world)
    trainer.fit()
    return unwrap(trainer.model).pe


def test_a_buffer_with_a_transposed_dimension_of_size_1_is_replicated() -> None:
    for positions in run_on_ranks(_train_the_rest, 2):
        assert torch.equal(positions[:, 0, 0], torch.arange(8.0))


def test_adamw_is_not_fused_for_sharded_and_whole_parameters() -> None:
    assert optimizers.adamw(nn.Linear(2, 2), 0.1).defaults["fused"]
    for fused in run_on_ranks(_fused_of_scaled, 2):
        assert not fused


class HasAdamw(Trains):
    def configure_models(self) -> None:
        self.model = nn.Sequential(Gated(), nn.Linear(6, 3))

    def configure_optimizers(self) -> None:
        self.optimizer = optimizers.adamw(self.model, 0.01)


def _fused_of_scaled(world: World) -> bool:
    trainer = HasAdamw(_config(strategy="fsdp"), world=world)
    trainer.fit()
    return bool(trainer.optimizer.defaults["fused"])


class Codebook(nn.Module):
    """As a VQ-VAE whose codes follow the rows of a rank: without the same codes, ranks train different models."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.register_buffer("codes", torch.randn(8, 6))
        self.register_buffer("count", torch.zeros(8, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x)
        nearest = torch.cdist(x, self.codes).argmin(1)
        if self.training:
            with torch.no_grad():
                self.codes.index_add_(0, nearest, x, alpha=0.1)
                self.count.index_add_(0, nearest, torch.ones_like(nearest))
        return self.last(x + self.codes[nearest].detach())


class Quantizes(TinyTrainer):
    def configure_models(self) -> None:
        self.model = Codebook()


def _quantize(world: World, folder: str) -> list[dict[str, torch.Tensor]]:
    found = []
    for name in ("ddp", "fsdp"):
        config = replace(_config(strategy=name), max_steps=6)
        found.append(weights_of(Quantizes(config, world=world)))
        stops = Quantizes(config, world=world, run_dir=f"{folder}/{name}", callbacks=[StopAt(3)])
        stops.fit()
        found.append(weights_of(Quantizes(config, world=world, run_dir=f"{folder}/{name}")))
    return found


def test_buffers_that_ranks_change_are_the_main_ranks_in_each_update(tmp_path: Path) -> None:
    for replicated, replicated_again, sharded, sharded_again in run_on_ranks(_quantize, 2, str(tmp_path)):
        torch.testing.assert_close(replicated_again, replicated, atol=0, rtol=0)
        torch.testing.assert_close(sharded_again, sharded, atol=0, rtol=0)
        torch.testing.assert_close(sharded, replicated)


class Quantized(nn.Module):
    """Frozen weights of dtypes that gloo does not send, and one whose memory is in the order of columns."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.ones(6, 4, dtype=torch.int16), requires_grad=False)
        self.scales = nn.Parameter(torch.ones(6, 1).to(torch.float8_e4m3fn), requires_grad=False)
        self.weight = nn.Parameter(torch.arange(18.0).view(6, 3).t() / 18)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scales.float()[:, 0] * self.codes.float()[:, 0]) @ self.weight.t()


class TrainsQuantized(Trains):
    def configure_models(self) -> None:
        self.model = Quantized()

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW([self.model.weight], lr=0.01)


class TrainsAList(Trains):
    """Weights of two losses in a list of parameters, which is never called."""

    def configure_models(self) -> None:
        self.model = nn.Linear(6, 3)
        self.log_variances = nn.ParameterList([torch.zeros(2)])

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW([*self.model.parameters(), *self.log_variances.parameters()], lr=0.01)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits, weight = self.model(batch["x"]), self.log_variances[0]
        losses = torch.stack([nn.functional.cross_entropy(logits, batch["y"]), logits.square().mean()])
        return (losses * (-weight).exp() + weight).sum()


class TrainsAHolder(Trains):
    """A module that only holds a network and a parameter, which are used one by one."""

    def configure_models(self) -> None:
        self.model = nn.Module()
        self.model.network = nn.Linear(6, 3)
        self.model.bias = nn.Parameter(torch.zeros(3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.model.network(batch["x"]) + self.model.bias, batch["y"])


def _fit_sharded(world: World, cls: type[Trains]) -> dict[str, torch.Tensor]:
    strategy = "fsdp" if world.size > 1 else "none"
    config = replace(_config(strategy=strategy), max_steps=3, global_batch_size=8)
    trainer = cls(config, world=world)
    trainer.fit()
    return {name: value.float() for name, value in weights(trainer).items()}  # float8 does not pickle


@pytest.mark.parametrize("cls", [TrainsQuantized, TrainsAList, TrainsAHolder])
def test_weights_that_fsdp_cannot_send_or_would_never_gather_are_trained(cls: type[Trains]) -> None:
    alone = _fit_sharded(ALONE, cls)
    for found in run_on_ranks(_fit_sharded, 2, cls):
        assert found.keys() == alone.keys()
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value)
