"""Parts of a sharded model that are called by themselves, and assignments to `data` of shards, which torch ignores."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset

from headway.trainer import ConfigError, ParallelConfig, Session, StepError, World
from headway.trainer.distributed.parallelize import check_modules
from tests.distributed import run_on_ranks
from tests.tiny import Deep, TinyConfig, TinyTrainer, weights
from tests.trainer.distributed.test_parallelize import _config, _of


class Holder(nn.Module):
    """Two networks in one module that is never called, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        self.teacher = nn.Linear(6, 3).requires_grad_(False)


class Distils(TinyTrainer):
    def configure_models(self) -> None:
        self.model = Holder()

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.student.parameters(), lr=0.01)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.model.student(batch["x"]), self.model.teacher(batch["x"]))


class CallsAPart(TinyTrainer):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model.first(batch["x"]).square().mean()


class Averages(TinyTrainer):
    """A teacher that follows the model, by hand."""

    averages_in = "on_step_end"

    def configure_models(self) -> None:
        super().configure_models()
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)

    def follow(self, place: str) -> None:
        if self.averages_in == place and self.training:
            with torch.no_grad():
                for average, weight in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
                    average.lerp_(weight, 0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.follow("before forward")
        with torch.no_grad():
            target = self.teacher(batch["x"])
        loss = F.mse_loss(self.model(batch["x"]), target + 1)
        self.follow("after forward")
        return loss

    def on_step_end(self) -> None:
        self.follow("on_step_end")


class AveragesBefore(Averages):
    averages_in = "before forward"


class AveragesAfter(Averages):
    averages_in = "after forward"


class Penalizes(TinyTrainer):
    """A gradient penalty, which differentiates a backward pass."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs = batch["x"].clone().requires_grad_()
        loss = self.model(inputs).square().mean()
        (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
        return loss + gradient.square().sum()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"output": self.model(batch["x"]).mean()}


class WeighsTasks(Penalizes):
    """Takes the gradient of each of two losses with respect to a parameter, as in GradNorm."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self.model(batch["x"])
        losses = outputs.square().mean(), outputs.sum()
        norms = [
            torch.autograd.grad(loss, self.model.first.weight, retain_graph=True)[0].norm().detach() for loss in losses
        ]
        return sum(loss / norm for loss, norm in zip(losses, norms, strict=True))


class Adjoint(torch.autograd.Function):
    """Computes its gradients by another forward pass, as a neural ODE does."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.module, ctx.weights = module, weights
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx: Any, *of_outputs: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            inputs = x.detach().requires_grad_()
            outputs = ctx.module(inputs)
        of_all = torch.autograd.grad(outputs, (inputs, *ctx.weights), of_outputs, allow_unused=True)
        of_x, *of_weights = of_all
        pairs = zip(of_weights, ctx.weights, strict=True)
        return None, of_x, *(torch.zeros_like(weight) if each is None else each for each, weight in pairs)


class AdjointBlocks(Deep):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + Adjoint.apply(block, x, *block.parameters())
        return self.last(self.dropout(x))


class UsesAdjoint(TinyTrainer):
    def configure_models(self) -> None:
        self.model = AdjointBlocks(9, 0.0)


class Prunes(TinyTrainer):
    def on_epoch_start(self) -> None:
        prune.l1_unstructured(self.model.first, "weight", amount=0.5)


class Assigns(TinyTrainer):
    def on_step_end(self) -> None:
        for parameter in self.model.parameters():
            parameter.data = parameter.data * 0.5


class AssignsLate(TinyTrainer):
    """After the updates in which every operator is looked at."""

    def on_step_end(self) -> None:
        if self.global_step == 4:
            self.model.last.bias.data = torch.zeros_like(self.model.last.bias.data)


class Converts(TinyTrainer):
    def on_step_end(self) -> None:
        if self.global_step == 4:
            self.model.to(torch.float64).to(torch.float32)


class Shrinks(TinyTrainer):
    @torch.no_grad()
    def on_step_end(self) -> None:
        self.model.last.weight.copy_(torch.renorm(self.model.last.weight, 2, 0, 0.3))


class Differentiates(TinyTrainer):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.func.vmap(torch.func.jacrev(self.model))(batch["x"]).square().mean()


class ChangesInPlace(TinyTrainer):
    def on_step_end(self) -> None:
        for parameter in self.model.parameters():
            parameter.data.mul_(0.5)


def _assign_in_a_session(world: World, config: TinyConfig) -> None:
    """Outside of `run.step()`, where no operator is looked at."""
    with Session(
        config,
        model=lambda: nn.Linear(4, 2),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4),
        world=world,
    ) as run:
        for batch in run:
            for (x,) in run.accumulate(batch):
                run.backward(run.model(x).square().mean())
            run.model.weight.data = run.model.weight.data * 0.5
            run.step()


def _train(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for strategy in ("ddp", "fsdp"):
        config = _config(strategy=strategy)
        for cls in (Distils, ChangesInPlace, Averages, AveragesBefore):
            # An evaluation is a forward pass without a backward pass.
            trainer = cls(replace(config, max_steps=4, evaluate_every="1 steps"), world=world)
            trainer.fit()
            found[f"{cls.__name__}/{strategy}"] = weights(trainer)
    Assigns(_config(strategy="ddp"), world=world).fit()
    with pytest.raises(StepError, match=r"parameter\.data = value has no effect on a sharded parameter: change it in"):
        Assigns(_config(strategy="fsdp"), world=world).fit()
    late = replace(_config(strategy="fsdp"), max_steps=8, log_every="5 steps")
    with pytest.raises(StepError, match=r"model\.last\.bias: parameter\.data = value has no effect") as assigned:
        AssignsLate(late, world=world).fit()
    found["late"] = [entry.name for entry in assigned.traceback]
    with pytest.raises(StepError, match=r"model\.weight: parameter\.data = value has no effect"):
        _assign_in_a_session(world, late)
    Converts(late, world=world).fit()
    with pytest.raises(RuntimeError, match="DTensor") as raised:
        CallsAPart(_config(strategy="fsdp"), world=world).fit()
    assert "call it in forward or another method of the model" in "".join(raised.value.__notes__)
    AveragesAfter(_config(strategy="ddp"), world=world).fit()
    with pytest.raises(RuntimeError, match="DTensor") as raised:
        AveragesAfter(_config(strategy="fsdp"), world=world).fit()
    assert "use them in on_step_end" in "".join(raised.value.__notes__)
    Penalizes(_config(strategy="ddp"), world=world).fit()
    with pytest.raises(RuntimeError, match="setStorage") as raised:
        Penalizes(_config(strategy="fsdp"), world=world).fit()
    assert "create_graph=True): use parallel.strategy='ddp'" in "".join(raised.value.__notes__)
    UsesAdjoint(_config(strategy="ddp"), world=world).fit()
    with pytest.raises(StepError, match=r"^Adjoint\.apply\(\) got parameters of a module before FSDP2 has gathered"):
        UsesAdjoint(_config(strategy="fsdp"), world=world).fit()
    for trainer_class, said, advice in (
        (WeighsTasks, "to not have been used in the graph", "finds their shards: use parallel.strategy='ddp'"),
        (Prunes, "Sharding propagation failed", "make the change in configure_models()"),
        (Shrinks, "renorm.*does not have a sharding strategy", "make the change in configure_models()"),
    ):
        trainer_class(_config(strategy="ddp"), world=world).fit()
        with pytest.raises(RuntimeError, match=said) as raised:
            trainer_class(_config(strategy="fsdp"), world=world).fit()
        assert advice in "".join(raised.value.__notes__)
    with pytest.raises(RuntimeError, match="Cannot access storage") as raised:
        Differentiates(_config(strategy="fsdp"), world=world).fit()
    assert "put the call into a method of the model" in "".join(raised.value.__notes__)
    return found


@pytest.mark.extended
def test_parts_of_a_model_that_only_holds_them_are_sharded_and_mistakes_are_named() -> None:
    for found in run_on_ranks(_train, 2):
        # At the next record of the log, not at the end.
        assert "_run_due_actions" in found["late"]
        for name in ("Distils", "ChangesInPlace", "Averages", "AveragesBefore"):
            for key, value in found[f"{name}/ddp"].items():
                torch.testing.assert_close(found[f"{name}/fsdp"][key], value, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_embedding_that_each_rank_would_shrink_otherwise_is_refused(strategy: Any) -> None:
    model = nn.Sequential(nn.Embedding(9, 6, max_norm=1.0), nn.Linear(6, 3))
    config = ParallelConfig(strategy=strategy)
    check_modules({"model": model}, config, _of(1))
    with pytest.raises(ConfigError, match=r"model\.0 is an Embedding with max_norm.*shrink all rows in on_step_end"):
        check_modules({"model": model}, config, _of(2))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_norm_over_all_ranks_that_needs_gpus_is_refused_on_cpus(strategy: Any) -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)))
    check_modules({"model": model}, ParallelConfig(strategy=strategy), _of(1))
    with pytest.raises(ConfigError, match=r"model\.1 is a SyncBatchNorm.*leave out convert_sync_batchnorm on CPUs"):
        check_modules({"model": model}, ParallelConfig(strategy=strategy), _of(2))


class ActNorm(nn.Module):
    """Takes its scale from the first batch, as in Glow."""

    def __init__(self, agrees: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("initialized", torch.tensor(0))
        self.last, self.agrees = nn.Linear(6, 3), agrees

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.initialized.item() == 0:
            self.scale.data.copy_(1 / (x.std(0) + 1e-6))
            if self.agrees:
                torch.distributed.broadcast(self.scale.data, src=0)
            self.initialized.fill_(1)
        return self.last(x * self.scale)


class LearnsFromData(TinyTrainer):
    agrees = called_before = False

    def configure_models(self) -> None:
        self.model = ActNorm(self.agrees)
        if self.called_before:
            self.model(torch.linspace(0, 1, 48).view(8, 6))


class Agrees(LearnsFromData):
    agrees = True


class CallsBefore(LearnsFromData):
    called_before = True


def _train_from_data(world: World) -> None:
    ddp, fsdp = (replace(_config(strategy=name), max_steps=3) for name in ("ddp", "fsdp"))
    with pytest.raises(StepError, match=r"model\.scale differ between the ranks after the first forward pass"):
        LearnsFromData(ddp, world=world).fit()
    with pytest.raises(StepError, match=r"scale is changed while FSDP2 has gathered it .*in configure_models\(\)"):
        LearnsFromData(fsdp, world=world).fit()
    found = []
    for trainer in (Agrees(ddp, world=world), CallsBefore(ddp, world=world), CallsBefore(fsdp, world=world)):
        trainer.fit()
        found.append(weights(trainer))
    for one, other in zip(found[1].values(), found[2].values(), strict=True):
        torch.testing.assert_close(one, other)
    assert found[1]["model.initialized"] == 1
    assert all(torch.equal(each, world.broadcast_tensor(each.clone())) for each in found[0].values())


def test_a_weight_that_a_forward_pass_takes_from_its_batch_is_refused_or_equal_on_all_ranks() -> None:
    run_on_ranks(_train_from_data, 2)


class Freezes(TinyTrainer):
    """Says again for gathered weights that they train, as a GAN does for its discriminator."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        for parameter in self.model.parameters():
            parameter.requires_grad_(True)
        return outputs


def _train_frozen(world: World) -> None:
    assert Freezes(replace(_config(strategy="fsdp"), max_steps=3), world=world).fit().steps == 3


def test_a_gathered_weight_may_be_asked_for_gradients() -> None:
    run_on_ranks(_train_frozen, 2)


class CallsByOtherWeights(TinyTrainer):
    """One inner update of MAML."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weights = dict(self.model.named_parameters())
        first = F.cross_entropy(torch.func.functional_call(self.model, weights, (batch["x"],)), batch["y"])
        gradients = torch.autograd.grad(first, list(weights.values()), create_graph=True)
        changed = {
            name: each - 0.1 * gradient for (name, each), gradient in zip(weights.items(), gradients, strict=True)
        }
        return F.cross_entropy(torch.func.functional_call(self.model, changed, (batch["x"],)), batch["y"])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"output": self.model(batch["x"]).mean()}


def _call_by_other_weights(world: World) -> None:
    with pytest.raises(StepError, match="functional_call calls a sharded model"):
        CallsByOtherWeights(_config(strategy="fsdp"), world=world).fit()
    CallsByOtherWeights(_config(strategy="ddp"), world=world).fit()


def test_a_functional_call_of_a_sharded_model_is_refused() -> None:
    run_on_ranks(_call_by_other_weights, 2)
