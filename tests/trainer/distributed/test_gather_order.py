"""Experts that the data chooses, as units of FSDP2: ranks that gather different ones are told so, at once or later."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from headway.trainer import ParallelConfig, Session, StepError, TrainerConfig, World
from tests.distributed import run_on_ranks
from tests.tiny import TinyTrainer, weights
from tests.trainer.distributed.test_parallelize import _config


class Layer(nn.Module):
    """From its call `first` on, each rank runs other experts: `uses`, by rank."""

    def __init__(self, rank: int, first: int, uses: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.used, self.first, self.calls = uses[rank], first, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        used = self.used if self.calls >= self.first else (0, 1)
        self.calls += 1
        for number in used:
            x = x + self.experts[number](x).tanh()
        return x


class Mixture(TinyTrainer):
    first = 0
    uses: tuple[tuple[int, ...], ...] = ((0, 1), (0, 2))
    is_root = False

    def configure_models(self) -> None:
        layer = Layer(self.world.rank, self.first, self.uses)
        self.model = layer if self.is_root else nn.Sequential(layer, nn.Linear(6, 3))

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)


class OneRunsMore(Mixture):
    uses = ((0,), (0, 2))


class Root(Mixture):
    is_root = True


class Later(Mixture):
    """Gathers of equal sizes, which torch does not notice."""

    first = 3
    uses = ((0, 1), (1, 0))


def _train(world: World) -> list[Any]:
    def refused(cls: type[Mixture]) -> str:
        with pytest.raises(StepError) as raised:
            cls(replace(_config(strategy="fsdp"), max_steps=8), world=world).fit()
        return str(raised.value)

    said = [refused(cls) for cls in (Mixture, OneRunsMore, Root, Later)]
    options = {"strategy": "fsdp", "find_unused_parameters": True, "shard_modules": ("Layer",)}
    named = Mixture(replace(_config(**options), max_steps=8), world=world)
    named.fit()
    replicated = Mixture(replace(_config(find_unused_parameters=True), max_steps=8), world=world)
    replicated.fit()
    torch.testing.assert_close(weights(named), weights(replicated))
    return said


def test_ranks_that_gather_different_units_are_told_which_layer_to_name() -> None:
    for one, more, root, later in run_on_ranks(_train, 2):
        assert one.startswith(
            "the ranks gather different parts of the model at the same time (rank 0: model.0.experts.1, rank 1: "
            "model.0.experts.2), and FSDP2 would mix up their weights"
        )
        assert "by parallel.shard_modules=('Layer',), and set parallel.find_unused_parameters=True" in one
        assert "(rank 0: none, rank 1: model.0.experts.2)" in more
        assert "put them into a module with forward() and name its class in parallel.shard_modules" in root
        assert later.startswith("the ranks have gathered different parts of the model at the same time since")


def _explore(world: World, first: int) -> None:
    """Train in a loop in which only the main rank calls the model before the update after `first`."""
    config = TrainerConfig(max_steps=40, parallel=ParallelConfig(strategy="fsdp"))
    with Session(
        config,
        model=lambda: nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=lambda: [torch.ones(4, 4) for _ in range(40)],
        world=world,
    ) as run:
        run.restore()
        # Not before: on a busy machine, the setup takes longer.
        world.set_timeout(6.0)
        for batch in run:
            if run.global_step == first and world.is_main:
                with torch.no_grad():
                    run.model(torch.ones(1, 4))
            for micro_batch in run.accumulate(batch):
                run.backward(run.model(micro_batch).square().mean())
            run.step()


@pytest.mark.extended
def test_ranks_that_call_a_model_unequally_often_outside_of_updates_wait_and_are_told_why() -> None:
    with pytest.raises(AssertionError) as raised:
        run_on_ranks(_explore, 2, 0)
    # The rank that times out later may see a closed connection instead.
    of_main, _, of_other = str(raised.value).partition("rank 1 raised")
    advice = (
        "under FSDP2 all ranks must call a model equally often: if one calls it outside of updates, such as to choose "
        "an action (calls of this rank: {})"
    )
    assert advice.format(1) in of_main or advice.format(0) in of_other


def test_ranks_that_call_a_model_unequally_often_outside_of_updates_are_told_at_an_agreement() -> None:
    with pytest.raises(
        AssertionError, match="If a rank calls the model outside of updates, such as to choose an action"
    ):
        run_on_ranks(_explore, 2, 3)
