"""Models, optimizers and schedulers that `configure_` methods set or return."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

from headway.trainer import ConfigError, ParallelConfig, World
from tests.distributed import run_on_ranks
from tests.tiny import Deep, Losses, StopAt, TinyConfig, TinyTrainer, weights

ALONE = World.single("cpu")


def test_an_optimizer_over_a_parameter_in_no_module_is_refused_before_the_first_step() -> None:
    class Tempered(TinyTrainer):
        def configure_optimizers(self) -> None:
            self.temperature = nn.Parameter(torch.tensor(1.0))
            self.optimizer = torch.optim.SGD([*self.model.parameters(), self.temperature], lr=0.1)

    trainer = Tempered(TinyConfig(max_steps=1), world=ALONE)
    with pytest.raises(ConfigError, match=r"'optimizer' holds 1 parameters .* shape \(\): put each into a module"):
        trainer.fit()
    assert trainer.global_step == 0


def test_an_optimizer_that_needs_a_closure_is_refused_before_the_first_step() -> None:
    class ByLineSearch(TinyTrainer):
        def configure_optimizers(self) -> None:
            self.optimizer = torch.optim.LBFGS(self.model.parameters())

    with pytest.raises(ConfigError, match=r"self\.optimizer is a LBFGS, whose step\(\) needs a closure"):
        ByLineSearch(TinyConfig(max_steps=1), world=ALONE).setup()


@pytest.mark.parametrize("named", [False, True])
def test_a_scheduler_inside_another_is_stepped_by_that_alone(named: bool) -> None:
    class Sequential(TinyTrainer):
        def configure_optimizers(self) -> None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
            warmup = lr_scheduler.LinearLR(self.optimizer, start_factor=0.25, total_iters=3)
            decay = lr_scheduler.ExponentialLR(self.optimizer, gamma=0.5)
            first = lr_scheduler.SequentialLR(self.optimizer, [warmup, decay], milestones=[3])
            self.scheduler = lr_scheduler.ChainedScheduler([first])
            if named:
                self.warmup, self.decay, self.first = warmup, decay, first

    losses = Losses()
    trainer = Sequential(TinyConfig(max_steps=6, log_every=1), world=ALONE, callbacks=[losses])  # type: ignore[arg-type]
    trainer.fit()
    assert list(trainer.schedulers) == ["scheduler"]
    assert list(losses.of("lr").values()) == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.5, 0.25])


def test_a_part_of_a_model_that_is_an_attribute_too_is_no_model_of_its_own() -> None:
    class Parts(TinyTrainer):
        def configure_models(self) -> None:
            self.encoder = nn.Linear(6, 4)
            self.model = nn.Sequential(self.encoder, nn.Linear(4, 3))

    trainer = Parts(TinyConfig(max_steps=2), world=ALONE)
    assert trainer.fit().status == "completed"
    assert list(trainer.models) == ["model"]
    assert trainer.model[0] is trainer.encoder
    assert trainer.encoder.weight is trainer.optimizer.param_groups[0]["params"][0]


class PartWithValues(TinyTrainer):
    """Its own initialization needs values, which under FSDP2 only the main rank creates."""

    def configure_models(self) -> None:
        self.encoder = nn.Linear(6, 4)
        nn.init.ones_(self.encoder.bias)
        self.model = nn.Sequential(self.encoder, nn.Linear(4, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        encoded = self.encoder(batch["x"]).square().mean() if self.calls_part else 0.0
        return F.cross_entropy(self.model(batch["x"]), batch["y"]) + encoded

    calls_part = True


class PartInWhole(PartWithValues):
    calls_part = False


def _train_parts(world: World) -> list[dict[str, torch.Tensor]]:
    found = []
    for strategy, cls in (("ddp", PartWithValues), ("ddp", PartInWhole), ("fsdp", PartInWhole)):
        trainer = cls(TinyConfig(max_steps=3, parallel=ParallelConfig(strategy=strategy)), world=world)
        trainer.fit()
        assert list(trainer.models) == ["model"]
        found.append(weights(trainer))
    return found


def test_a_part_that_is_an_attribute_too_is_trained_once_on_each_rank() -> None:
    one, other = run_on_ranks(_train_parts, 2)
    torch.testing.assert_close(one, other, atol=0, rtol=0)
    called, replicated, sharded = one
    torch.testing.assert_close(sharded, replicated)
    assert not torch.equal(called["model.0.weight"], replicated["model.0.weight"])


def test_models_that_share_a_weight_are_refused_with_its_name() -> None:
    class Share(TinyTrainer):
        def configure_models(self) -> None:
            embedding = nn.Linear(6, 4)
            self.model = nn.Sequential(embedding, nn.Linear(4, 3))
            self.critic = nn.Sequential(embedding, nn.Linear(4, 1))

    with pytest.raises(ConfigError, match=r"model and critic share model\.0\.weight, but each"):
        Share(TinyConfig(max_steps=2), world=ALONE).fit()


class Returning(TinyTrainer):
    """Returns the objects that `TinyTrainer` sets as attributes."""

    def configure_models(self) -> Any:
        return Deep(self.config.width, self.config.dropout)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.config.learning_rate)
        return optimizer, lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)


def test_configure_methods_may_return_what_they_make() -> None:
    returned, assigned = (
        Returning(TinyConfig(max_steps=3), world=ALONE),
        TinyTrainer(TinyConfig(max_steps=3), world=ALONE),
    )
    for trainer in (returned, assigned):
        trainer.fit()
    assert (list(returned.models), list(returned.optimizers), list(returned.schedulers)) == (
        ["model"],
        ["optimizer"],
        ["scheduler"],
    )
    assert all(
        torch.equal(one, other)
        for one, other in zip(returned.model.parameters(), assigned.model.parameters(), strict=True)
    )


def test_several_models_are_returned_by_name_and_dataloaders_may_be_attributes() -> None:
    class Named(TinyTrainer):
        def configure_models(self) -> Any:
            return {"encoder": nn.Linear(6, 4), "head": nn.Linear(4, 3)}

        def configure_optimizers(self) -> Any:
            made = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in self.models.items()}
            return {**made, "encoder": (made["encoder"], lr_scheduler.StepLR(made["encoder"], 2))}

        def configure_dataloaders(self) -> Any:
            self.train_dataloader, self.val_dataloader = super().configure_dataloaders()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return F.cross_entropy(self.models["head"](self.models["encoder"](batch["x"])), batch["y"])

    trainer = Named(TinyConfig(max_steps=3), world=ALONE)
    assert trainer.fit().metrics.keys() >= {"train/loss", "validation/loss"}
    assert list(trainer.models) == ["encoder", "head"]
    assert list(trainer.schedulers) == ["encoder_scheduler"]


@pytest.mark.parametrize(
    ("method", "returned", "message"),
    [
        ("configure_models", 3, r"configure_models\(\) returned int 3; return Module objects"),
        ("configure_models", (nn.Linear(1, 1), nn.Linear(1, 1)), "model= of a Session, returned several objects"),
        (
            "configure_optimizers",
            "Adam",
            r"configure_optimizers\(\) returned str 'Adam'; return Optimizer or LRScheduler",
        ),
    ],
)
def test_what_a_configure_method_must_not_return_is_refused(method: str, returned: Any, message: str) -> None:
    trainer = type("Wrong", (TinyTrainer,), {method: lambda self: returned})(TinyConfig(max_steps=1), world=ALONE)
    with pytest.raises(ConfigError, match=message):
        trainer.fit()


def test_a_model_under_a_private_name_is_refused_with_the_name_to_give_it() -> None:
    class Hidden(TinyTrainer):
        def configure_models(self) -> None:
            super().configure_models()
            self._teacher = nn.Linear(6, 3)

    with pytest.raises(ConfigError, match=r"self\._teacher of Hidden .* private attribute.* rename it self\.teacher"):
        Hidden(TinyConfig(max_steps=1), world=ALONE).fit()


class _Around(torch.optim.Optimizer):
    """Steps another optimizer with a momentum of its own, as SAM does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


class _AroundSaved(_Around):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "base": self.base.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "base"})
        self.base.load_state_dict(state_dict["base"])
        self.param_groups = self.base.param_groups


@pytest.mark.parametrize("kind", [_Around, _AroundSaved])
def test_the_state_of_an_optimizer_inside_another_is_saved_or_missed(tmp_path: Path, kind: Any) -> None:
    class Nested(TinyTrainer):
        def configure_optimizers(self) -> None:
            self.optimizer = kind(self.model.parameters())

    config = TinyConfig(max_steps=4, evaluate_every=None)
    whole = Nested(config, world=ALONE)
    whole.fit()
    if kind is _Around:
        with pytest.raises(ConfigError, match=r"_Around around another optimizer, base, .*override state_dict\(\)"):
            Nested(config, world=ALONE, run_dir=tmp_path).fit()
        return
    Nested(config, world=ALONE, run_dir=tmp_path, callbacks=[StopAt(2)]).fit()
    resumed = Nested(config, world=ALONE, run_dir=tmp_path)
    assert resumed.fit().resumed_from is not None
    assert all(map(torch.equal, weights(whole).values(), weights(resumed).values()))


class KeepsInList(TinyTrainer):
    def configure_models(self) -> None:
        super().configure_models()
        self.parts = [self.model.first]
        self.targets = [copy.deepcopy(self.model)]


class KeepsInDict(TinyTrainer):
    def configure_models(self) -> None:
        super().configure_models()
        self.targets = {"slow": copy.deepcopy(self.model)}


@pytest.mark.parametrize(("trainer_class", "instead"), [(KeepsInList, "ModuleList"), (KeepsInDict, "ModuleDict")])
def test_models_in_a_plain_list_of_the_trainer_are_refused(trainer_class: type[TinyTrainer], instead: str) -> None:
    with pytest.raises(ConfigError, match=rf"^self\.targets is a .* of modules.*: use nn\.{instead}, or an attribute"):
        trainer_class(TinyConfig(max_steps=1), world=ALONE).setup()
