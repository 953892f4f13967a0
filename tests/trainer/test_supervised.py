"""Training without a subclass: pairs, dicts, models that bring their loss, on one rank and on two."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway.trainer import (
    CheckpointConfig,
    ConfigError,
    ParallelConfig,
    StepError,
    SupervisedTrainer,
    TrainerConfig,
    World,
)
from tests.distributed import run_on_ranks
from tests.tiny import Rows, StopAt, weights

ALONE = World.single("cpu")
ROWS = Rows(32)


def _config(**changes: Any) -> TrainerConfig:
    return TrainerConfig(**{"max_epochs": 2, "global_batch_size": 8, "checkpoint": CheckpointConfig(), **changes})


def _model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))


def _pairs() -> DataLoader[Any]:
    return DataLoader(TensorDataset(ROWS.x, ROWS.y), batch_size=8, shuffle=True)


def _dicts(targets: str) -> DataLoader[Any]:
    rows = [{"x": ROWS.x[i], targets: ROWS.y[i]} for i in range(32)]
    return DataLoader(rows, batch_size=8, shuffle=True)  # type: ignore[arg-type]


class ByName(nn.Module):
    """Takes its input by name; with `brings_loss` as a Hugging Face model does, in evaluation mode at first."""

    def __init__(self, brings_loss: Any = None) -> None:
        super().__init__()
        self.inner = _model()
        self.brings_loss = brings_loss
        self.modes: set[bool] = set()
        if brings_loss:
            self.eval()

    def forward(self, x: torch.Tensor, **labels: torch.Tensor) -> Any:
        self.modes.add(self.training)
        logits = self.inner(x)
        if not self.brings_loss:
            assert not labels, "the model of a loss function gets no targets"
            return logits
        return self.brings_loss(loss=F.cross_entropy(logits, labels["labels"]), logits=logits)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _losses(**options: Any) -> list[float]:
    trainer = SupervisedTrainer(**{"config": _config(), "world": ALONE, "optimizer": _sgd, **options})
    result = trainer.fit()
    assert result.status == "completed"
    return [row["train/loss"] for row in result.history]


def test_pairs_dicts_and_models_with_a_loss_train_alike() -> None:
    reference = _losses(model=_model(), train=_pairs(), loss_fn=F.cross_entropy)
    assert reference[1] < reference[0]
    assert _losses(model=ByName(), train=_dicts("labels"), loss_fn=F.cross_entropy) == reference
    assert _losses(model=ByName(), train=_dicts("targets"), loss_fn=F.cross_entropy) == reference
    for kind in (SimpleNamespace, dict):
        assert _losses(model=ByName(kind), train=_dicts("labels")) == reference
    with_logits = ByName(SimpleNamespace)
    with_logits.forward = lambda x: SimpleNamespace(logits=with_logits.inner(x))  # type: ignore[method-assign]
    assert _losses(model=with_logits, train=_dicts("labels"), loss_fn=F.cross_entropy) == reference


def test_a_model_that_was_loaded_in_evaluation_mode_trains() -> None:
    model = ByName(SimpleNamespace)
    assert not model.training
    _losses(model=model, train=_dicts("labels"), validation=None)
    assert model.modes == {True}
    partly = _model()
    partly[0].eval()
    _losses(model=partly, train=_pairs(), loss_fn=F.cross_entropy)
    assert not partly[0].training, "what is frozen on purpose stays so"


@pytest.mark.filterwarnings("ignore:self.scheduler steps after every update")
def test_optimizers_and_schedulers_are_given_or_made() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    given = _losses(model=model, optimizer=optimizer, scheduler=scheduler, train=_pairs(), loss_fn=F.cross_entropy)
    assert scheduler.last_epoch == 8
    made = _losses(
        model=_model(),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        train=_pairs(),
        loss_fn=F.cross_entropy,
    )
    assert made == given
    by_name = _losses(
        model=_model(),
        optimizer="SGD",
        optimizer_settings={"lr": 0.1},
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        train=_pairs(),
        loss_fn=F.cross_entropy,
    )
    assert by_name == given


def test_it_evaluates_and_resumes(tmp_path: Any) -> None:
    def trainer(*callbacks: Any, run_dir: Any = None) -> SupervisedTrainer:
        return SupervisedTrainer(
            model=_model(),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
            loss_fn=F.cross_entropy,
            train=_pairs(),
            validation=_pairs(),
            config=_config(),
            world=ALONE,
            run_dir=run_dir,
            callbacks=callbacks,
        )

    reference, resumed = trainer(), trainer(run_dir=tmp_path)
    assert reference.fit().metrics["validation/loss"] > 0
    trainer(StopAt(3), run_dir=tmp_path).fit()
    assert resumed.fit().resumed_from is not None
    for name, value in weights(reference).items():
        assert torch.equal(weights(resumed)[name], value)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"train": [ROWS.x]}, StepError, "loss_fn needs targets, and the batch is a Tensor without"),
        ({"train": [{"x": ROWS.x}], "model": ByName()}, StepError, "the batch is a dict without"),
        ({"loss_fn": None}, StepError, "no loss_fn, and Sequential returned a Tensor without a loss"),
        ({"loss_fn": None, "train": [ROWS.x]}, StepError, "no loss_fn, and Sequential returned a Tensor"),
        ({"optimizer": _sgd(_model().parameters())}, ConfigError, "holds none of the model's parameters"),
        ({"config": {"max_epochs": 1}}, ConfigError, "SupervisedTrainer needs a TrainerConfig"),
        ({"optimizer_settings": {"lr": 0.1}}, ConfigError, "optimizer_settings needs an optimizer by name"),
        ({"model": nn.ReLU()}, ConfigError, "made no module with parameters"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    settings = {
        "model": _model(),
        "optimizer": _sgd,
        "loss_fn": F.cross_entropy,
        "train": _pairs(),
        "config": _config(global_batch_size=None),
        "world": ALONE,
    }
    with pytest.raises(error, match=message):
        SupervisedTrainer(**{**settings, **options}).fit()


def _on_ranks(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for strategy in ("ddp", "fsdp"):
        torch.manual_seed(world.rank)
        # Each rank comes with weights of its own; the main rank's count.
        model = _model() if world.is_main else nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
        config = _config(parallel=ParallelConfig(strategy=strategy))  # type: ignore[arg-type]
        found[strategy] = _losses(model=model, train=_pairs(), loss_fn=F.cross_entropy, config=config, world=world)
    model = _model()
    with pytest.raises(ConfigError, match=r"which sharding replaces: give a function"):
        _losses(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            train=_pairs(),
            loss_fn=F.cross_entropy,
            config=config,
            world=world,
        )
    return found


def test_two_ranks_take_the_weights_of_the_main_one() -> None:
    alone = _losses(model=_model(), train=_pairs(), loss_fn=F.cross_entropy)
    for rank in run_on_ranks(_on_ranks, 2):
        assert rank["ddp"] == pytest.approx(alone, rel=1e-5)
        assert rank["fsdp"] == pytest.approx(alone, rel=1e-5)


def test_the_optimizer_gets_what_is_trained() -> None:
    given: list[int] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        found = list(parameters)
        given.append(len(found))
        return torch.optim.SGD(found, lr=0.1)

    config = TrainerConfig(max_steps=1, freeze=("model.0.*",))
    trainer = SupervisedTrainer(
        model=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)),
        optimizer=make,
        loss_fn=nn.functional.mse_loss,
        train=[(torch.randn(2, 4), torch.randn(2, 1))],
        config=config,
        world=World.single("cpu"),
    )
    trainer.fit()
    assert given == [2]


def test_without_an_optimizer_it_is_adamw_with_decay_groups() -> None:
    trainer = SupervisedTrainer(
        model=_model(), train=_pairs(), loss_fn=F.cross_entropy, config=TrainerConfig(max_steps=2), world=ALONE
    )
    result = trainer.fit()
    assert isinstance(trainer.optimizer, torch.optim.AdamW)
    assert result.metrics["lr/optimizer/decay"] == result.metrics["lr/optimizer/no_decay"] == 1e-3
