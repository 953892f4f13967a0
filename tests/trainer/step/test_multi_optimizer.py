"""Two optimizers that step in turn: the loss of one does not add to the gradients of the other."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from headway.trainer import ParallelConfig, Trainer, World
from tests.distributed import run_on_ranks
from tests.tiny import Losses, Rows, TinyConfig, weights

ALONE = World.single("cpu")


class Gan(Trainer[TinyConfig]):
    """A generator and a critic that are trained in every update, in an order set by the class."""

    first = "critic"

    def configure_models(self) -> None:
        self.generator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def configure_optimizers(self) -> None:
        self.generator_optimizer = torch.optim.SGD(self.generator.parameters(), lr=0.5)
        self.critic_optimizer = torch.optim.SGD(self.critic.parameters(), lr=0.5)

    def configure_dataloaders(self) -> Any:
        return DataLoader(Rows(64), batch_size=16)

    def losses(self, batch: Any, noise: torch.Tensor) -> Any:
        fake = self.generator(noise)
        critic = F.softplus(-self.critic(batch["x"])).mean() + F.softplus(self.critic(fake.detach())).mean()
        return critic, lambda: F.softplus(-self.critic(fake)).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        # Of the row itself, so that it is the same however the batch is cut.
        critic, generator = self.losses(batch, batch["x"].roll(1, dims=1))
        turns = [(lambda: critic, self.critic_optimizer), (generator, self.generator_optimizer)]
        for loss, optimizer in turns if self.first == "critic" else reversed(turns):
            self.backward(loss())
            self.step(optimizer)
        return {"critic": critic}


class GeneratorFirst(Gan):
    first = "generator"


class Both(Gan):
    """One loss for both: a turn of two optimizers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        fake = self.generator(batch["x"].roll(1, dims=1))
        self.backward(F.softplus(-self.critic(fake)).mean())
        self.step(self.critic_optimizer)
        self.step(self.generator_optimizer)
        return {}


class Automatic(Both):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        fake = self.generator(batch["x"].roll(1, dims=1))
        return F.softplus(-self.critic(fake)).mean()


CLASSES = [Gan, GeneratorFirst, Both, Automatic]


def _config(**changes: Any) -> TinyConfig:
    settings = {"max_steps": 4, "evaluate_every": None, "global_batch_size": 16, **changes}
    return TinyConfig(**settings)


def _cut(size: int) -> list[list[int]]:
    """The rows of a batch of 16, in micro-batches of at most so many."""
    count = -(16 // -size)
    return [list(range(16 * i // count, 16 * (i + 1) // count)) for i in range(count)]


def _by_hand(trainer_class: type[Gan], rows: list[list[int]], precision: Any = "fp32") -> dict[str, torch.Tensor]:
    """Adds up the gradient of each loss with respect to the parameters of its own optimizer, and no others."""
    trainer = trainer_class(_config(precision=precision), world=ALONE)
    trainer.setup()
    x_all = Rows(64).x
    critic, generator = (
        (optimizer, optimizer.param_groups[0]["params"])
        for optimizer in (trainer.critic_optimizer, trainer.generator_optimizer)
    )
    for step in range(4):
        sums: dict[Any, Any] = {p: torch.zeros_like(p) for _, parameters in (critic, generator) for p in parameters}
        pieces = [x_all[16 * step :][each] for each in rows]

        def turn(loss: torch.Tensor, *owners: Any, of: torch.Tensor, sums: dict[Any, Any] = sums) -> None:
            held = [p for _, parameters in owners for p in parameters]
            for parameter, gradient in zip(held, torch.autograd.grad(loss * (len(of) / 16), held), strict=True):
                sums[parameter] += gradient
            if of is pieces[-1]:  # noqa: B023
                for optimizer, parameters in owners:
                    for parameter in parameters:
                        parameter.grad = sums[parameter]
                    optimizer.step()

        for x in pieces:
            noise = x.roll(1, dims=1)
            with trainer.autocast():
                if issubclass(trainer_class, Both):
                    loss = F.softplus(-trainer.critic(trainer.generator(noise))).mean()
                else:
                    critic_loss, generator_loss = trainer.losses({"x": x}, noise)
            if issubclass(trainer_class, Both):
                turn(loss, critic, generator, of=x)
            elif trainer.first == "critic":
                turn(critic_loss, critic, of=x)
                with trainer.autocast():
                    loss = generator_loss()
                turn(loss, generator, of=x)
            else:
                with trainer.autocast():
                    loss = generator_loss()
                turn(loss, generator, of=x)
                turn(critic_loss, critic, of=x)
    return weights(trainer)


def _trained(world: World, trainer_class: type[Gan], **changes: Any) -> dict[str, torch.Tensor]:
    trainer = trainer_class(_config(**changes), world=world)
    assert trainer.fit().steps == 4
    return weights(trainer)


@pytest.mark.parametrize("trainer_class", CLASSES)
@pytest.mark.parametrize("micro_batch_size", [16, 8, 3])
def test_accumulation_gives_two_optimizers_what_the_whole_batch_would(
    trainer_class: type[Gan], micro_batch_size: int
) -> None:
    """A generator that comes second learns in the last micro-batch from a critic that has stepped, as written."""
    trained = _trained(ALONE, trainer_class, micro_batch_size=micro_batch_size)
    if trainer_class is not Gan:
        for name, value in _by_hand(trainer_class, _cut(16)).items():
            torch.testing.assert_close(trained[name], value, atol=1e-5, rtol=1e-4)
    for name, value in _by_hand(trainer_class, _cut(micro_batch_size)).items():
        torch.testing.assert_close(trained[name], value, atol=1e-5, rtol=1e-4)


def _on_ranks(world: World, strategy: str) -> list[dict[str, torch.Tensor]]:
    return [
        _trained(world, trainer_class, micro_batch_size=4, parallel=ParallelConfig(strategy=strategy))  # type: ignore[arg-type]
        for trainer_class in CLASSES
    ]


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.extended)])
def test_accumulation_on_ranks_gives_two_optimizers_what_the_whole_batch_would(strategy: str) -> None:
    # The first rank has the first half of each batch, and each rank two micro-batches.
    rows = [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    wanted = [_by_hand(trainer_class, rows) for trainer_class in CLASSES]
    for rank in run_on_ranks(_on_ranks, 2, strategy):
        for number, (trained, by_hand) in enumerate(zip(rank, wanted, strict=True)):
            for name, value in by_hand.items():
                torch.testing.assert_close(
                    trained[name], value, atol=1e-5, rtol=1e-4, msg=lambda text, at=(number, name): f"{at}: {text}"
                )


def test_a_forward_pass_after_a_step_sees_the_new_weights_under_autocast() -> None:
    """Autocast keeps the bfloat16 casts of weights until its context ends, which is the whole training step."""
    trained = _trained(ALONE, Gan, precision="bf16")
    for name, value in _by_hand(Gan, _cut(16), "bf16").items():
        assert torch.equal(trained[name], value), name


def test_the_norm_of_a_group_is_that_of_the_turn_it_learns_in() -> None:
    losses = Losses()
    config = _config(log_every=1, grad_norm_groups=("generator.*", "critic.*"))
    Gan(config, world=ALONE, callbacks=[losses]).fit()
    for record in losses.records.values():
        norms = record["grad_norm/generator.*"], record["grad_norm/critic.*"]
        assert min(norms) > 0
        assert record["grad_norm"] == pytest.approx(sum(norms) / 2)


class Heads(nn.Module):
    """A policy and a value from one forward pass, whose losses reach a part of the model each."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.policy, self.value = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 1)
        self.register_buffer("calls", torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.calls.zero_()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls_before = self.calls.clone()  # of the main rank, on every rank
        self.calls += 1 + self.calls * x.mean()
        hidden = torch.tanh(self.trunk(x))
        return self.policy(hidden), self.value(hidden).squeeze(1)


def _losses_of_heads(model: Heads, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    logits, values = model(batch["x"])
    return F.cross_entropy(logits, batch["y"]), (values - batch["x"].sum(1)).square().mean()


class ActorCritic(Trainer[TinyConfig]):
    """One model, two optimizers, and two backward passes through the graph of one forward pass."""

    def configure_models(self) -> None:
        self.model = Heads()

    def configure_optimizers(self) -> None:
        actor = [*self.model.trunk.parameters(), *self.model.policy.parameters()]
        self.actor_optimizer = torch.optim.SGD(actor, lr=0.5)
        self.critic_optimizer = torch.optim.SGD(self.model.value.parameters(), lr=0.5)

    def configure_dataloaders(self) -> Any:
        return DataLoader(Rows(64), batch_size=16)

    def train_critic(self, loss: torch.Tensor) -> None:
        self.backward(loss, retain_graph=True)
        self.step(self.critic_optimizer)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        actor, critic = _losses_of_heads(self.model, batch)
        self.train_critic(critic)
        self.backward(actor)
        self.step(self.actor_optimizer)


class InTurn(ActorCritic):
    """Each update is of one of the two."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        actor, critic = _losses_of_heads(self.model, batch)
        if self.global_step % 2:
            self.backward(actor)
            self.step(self.actor_optimizer)
        else:
            self.train_critic(critic)


PARTIAL = [ActorCritic, InTurn]


def _heads_by_hand(trainer_class: type[ActorCritic]) -> dict[str, torch.Tensor]:
    trainer = trainer_class(_config(), world=ALONE)
    trainer.setup()
    for step, batch in enumerate(DataLoader(Rows(64), batch_size=16)):
        losses = _losses_of_heads(trainer.model, batch)
        both = list(zip(losses, (trainer.actor_optimizer, trainer.critic_optimizer), strict=True))
        turns = [both[(step + 1) % 2]] if trainer_class is InTurn else both
        for loss, optimizer in turns:
            parameters = optimizer.param_groups[0]["params"]
            for parameter, gradient in zip(
                parameters, torch.autograd.grad(loss, parameters, retain_graph=True), strict=True
            ):
                parameter.grad = gradient
        for _, optimizer in turns:
            optimizer.step()
    return {name: value for name, value in weights(trainer).items() if "calls" not in name}


def _partial_on_ranks(world: World, strategy: str) -> list[dict[str, torch.Tensor]]:
    trained = []
    for trainer_class, size in itertools.product(PARTIAL, (4, 8)):
        config = _config(micro_batch_size=size, parallel=ParallelConfig(strategy=strategy))  # type: ignore[arg-type]
        trainer = trainer_class(config, world=world)
        trainer.fit()
        trained.append(weights(trainer) | {"calls before": trainer.model.calls_before})
    return trained


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.extended)])
def test_losses_that_reach_a_part_of_a_model_each_train_it_on_ranks(strategy: str) -> None:
    """DDP waits for the gradients of all parameters, which no backward pass of such a step gives."""
    wanted = [_heads_by_hand(trainer_class) for trainer_class in PARTIAL for _ in range(2)]
    ranks = run_on_ranks(_partial_on_ranks, 2, strategy)
    for first, second in zip(*(rank[1::2] for rank in ranks), strict=True):  # the first micro-batch of an update
        assert torch.equal(first["calls before"], second["calls before"])
    for rank in ranks:
        for number, (trained, by_hand) in enumerate(zip(rank, wanted, strict=True)):
            for name, value in by_hand.items():
                torch.testing.assert_close(
                    trained[name], value, atol=1e-6, rtol=1e-5, msg=lambda text, at=(number, name): f"{at}: {text}"
                )
