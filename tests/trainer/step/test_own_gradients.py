"""Gradients that a step computes by itself, as in DP-SGD: equal to a plain loop, on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.optim import SGD, Optimizer

from headway.trainer import ConfigError, ParallelConfig, StepError, World
from tests.distributed import run_on_ranks
from tests.tiny import Rows, TinyConfig, TinyTrainer, weights

ALONE = World.single("cpu")
LIMIT, NOISE = 0.5, 0.1


class Private(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).tanh())

    def clipped(self, x_BC: torch.Tensor, y_B: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the mean of the rows' gradients, each clipped."""

        def loss(weights: Any, x_C: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(functional_call(self, weights, (x_C[None],)), y[None])

        own = {name: parameter.detach() for name, parameter in self.named_parameters()}
        of_rows = vmap(grad(loss), (None, 0, 0))(own, x_BC, y_B)
        norms_B = torch.stack([each.flatten(1).norm(dim=1) for each in of_rows.values()]).norm(dim=0)
        share_B = (LIMIT / norms_B).clamp(max=1) / len(x_BC)
        return {name: torch.einsum("b,b...->...", share_B, each) for name, each in of_rows.items()}

    def surrogate(self, x_BC: torch.Tensor, y_B: torch.Tensor) -> torch.Tensor:
        gradients = self.clipped(x_BC, y_B)
        return torch.stack([(p * gradients[name]).sum() for name, p in self.named_parameters()]).sum()


def _noise(step: int, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [NOISE * torch.randn(each.shape, generator=generator) for each in parameters]


class DpSgd(TinyTrainer):
    def configure_models(self) -> None:
        self.model = Private()

    def configure_optimizers(self) -> None:
        self.optimizer = SGD(self.model.parameters(), lr=0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append((self.global_step, batch["id"].tolist()))
        self.backward(self.model.surrogate(batch["x"], batch["y"]))

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.model(batch["x"]), batch["y"])

    def on_gradients_ready(self) -> None:
        parameters = list(self.model.parameters())
        for parameter, noise in zip(parameters, _noise(self.global_step, parameters), strict=True):
            parameter.grad += noise


def _train(world: World, micro_batch_size: int, strategy: Any = "ddp") -> dict[str, torch.Tensor]:
    config = TinyConfig(
        max_steps=5,
        global_batch_size=8,
        micro_batch_size=micro_batch_size,
        parallel=ParallelConfig(strategy=strategy if world.size > 1 else "none"),
    )
    trainer = DpSgd(config, world=world)
    trainer.setup()
    trainer.first = weights(trainer)
    trainer.fit()
    return weights(trainer) if world.size > 1 else trainer


def test_gradients_of_ones_own_are_those_of_a_plain_loop() -> None:
    trainer: Any = _train(ALONE, 8)
    model, rows = Private(), Rows(103)
    model.load_state_dict({name.removeprefix("model."): value for name, value in trainer.first.items()})
    for step, (_, ids) in enumerate(trainer.seen):
        gradients = model.clipped(rows.x[ids], rows.y[ids])
        noise = _noise(step, list(model.parameters()))
        with torch.no_grad():
            for (name, parameter), draws in zip(model.named_parameters(), noise, strict=True):
                parameter.sub_(gradients[name] + draws, alpha=0.5)
    own = {f"model.{name}": value for name, value in model.state_dict().items()}
    torch.testing.assert_close(weights(trainer), own, atol=0, rtol=0)


def _train_on_ranks(world: World) -> dict[str, torch.Tensor]:
    with pytest.raises(StepError, match=r"functional_call calls a sharded model.*use parallel\.strategy='ddp'"):
        _train(world, 4, "fsdp")
    return _train(world, 2)


def test_gradients_of_ones_own_are_averaged_over_micro_batches_and_ranks() -> None:
    expected = weights(_train(ALONE, 8))  # type: ignore[arg-type]
    for rank in run_on_ranks(_train_on_ranks, 2):
        torch.testing.assert_close(rank, expected)


class Assigns(DpSgd):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.model(batch["x"]), batch["y"])
        for (_, parameter), each in zip(
            self.model.named_parameters(), self.model.clipped(batch["x"], batch["y"]).values(), strict=True
        ):
            parameter.grad = each
        return loss


def test_assigned_gradients_are_refused_with_the_way_that_works() -> None:
    with pytest.raises(StepError, match=r"Pass gradients that you compute through a loss: self\.backward\(sum of"):
        Assigns(TinyConfig(max_steps=1), world=ALONE).fit()


class Hookless(SGD):
    """Leaves out `Optimizer.__init__`, as Opacus' DPOptimizer."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.param_groups, self.state, self.defaults = (
            inner,
            inner.param_groups,
            inner.state,
            inner.defaults,
        )


class TrainsHookless(TinyTrainer):
    def configure_optimizers(self) -> None:
        self.optimizer = Hookless(SGD(self.model.parameters(), lr=0.1))


def test_an_optimizer_without_hooks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"self\.optimizer is a Hookless, whose __init__\(\) does not call that of"):
        TrainsHookless(TinyConfig(max_steps=1), world=ALONE).fit()
