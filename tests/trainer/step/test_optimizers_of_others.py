"""Optimizers of other packages: with modes, with random numbers, of another class, or without support for shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer

from headway.trainer import CheckpointConfig, ConfigError, Duration, ParallelConfig, World
from tests.distributed import run_on_ranks
from tests.tiny import StopAt, TinyConfig, TinyTrainer, weights

ALONE = World.single("cpu")


class ScheduleFree(SGD):
    """As schedule-free SGD: trains at y, between the average x and the sequence z, and evaluates x."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["train_mode"] = False

    @torch.no_grad()
    def _move(self, weight: float, *, train_mode: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != train_mode:
                group["train_mode"] = train_mode
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight)

    def train(self) -> None:
        self._move(1 - 0.9, train_mode=True)

    def eval(self) -> None:
        self._move(1 - 1 / 0.9, train_mode=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("not in train mode")
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 0.3).sub_(p.grad, alpha=group["lr"] / 2)
                z.sub_(p.grad, alpha=group["lr"])


class TrainsScheduleFree(TinyTrainer):
    def configure_optimizers(self) -> None:
        self.optimizer = ScheduleFree(self.model.parameters(), lr=0.5)
        self.evaluated: list[torch.Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if not batch_idx and not hasattr(self.model.first.weight, "full_tensor"):
            self.evaluated.append(self.model.first.weight.clone())
        return super().validation_step(batch, batch_idx)


def _config(**options: Any) -> TinyConfig:
    return TinyConfig(max_steps=6, **options)


def _free(world: World, strategy: Any, every: int | None, **options: Any) -> TrainsScheduleFree:
    config = _config(
        parallel=ParallelConfig(strategy=strategy), evaluate_every=Duration(every, "steps") if every else None
    )
    trainer = TrainsScheduleFree(config, world=world, **options)
    trainer.fit()
    return trainer


def test_an_optimizer_with_modes_evaluates_its_weights_and_training_does_not_change(tmp_path: Path) -> None:
    trainer = _free(ALONE, "none", 1)
    expected = weights(_free(ALONE, "none", None))
    torch.testing.assert_close(weights(trainer), expected, atol=0, rtol=0)
    first, *_, last = trainer.evaluated
    x = trainer.model.first.weight.lerp(trainer.optimizer.state[trainer.model.first.weight]["z"], 1 - 1 / 0.9)
    torch.testing.assert_close(last, x)
    assert not torch.equal(first, last)
    assert not torch.equal(last, trainer.model.first.weight)
    # Stopped, evaluated and resumed.
    _free(ALONE, "none", None, run_dir=tmp_path / "run", callbacks=[StopAt(3)])
    torch.testing.assert_close(weights(_free(ALONE, "none", None, run_dir=tmp_path / "run")), expected, atol=0, rtol=0)


def _free_on_ranks(world: World) -> list[dict[str, torch.Tensor]]:
    return [weights(_free(world, strategy, every)) for strategy in ("ddp", "fsdp") for every in (None, 1)]


@pytest.mark.extended
def test_an_optimizer_with_modes_evaluates_sharded_weights() -> None:
    for replicated, evaluated, *sharded in run_on_ranks(_free_on_ranks, 2):
        torch.testing.assert_close(evaluated, replicated, atol=0, rtol=0)
        for each in sharded:
            torch.testing.assert_close(each, replicated)


class Wrapper:
    """Not an Optimizer, as `schedulefree.ScheduleFreeWrapper`."""

    def __init__(self, base: Optimizer) -> None:
        self.base, self.param_groups = base, base.param_groups

    def zero_grad(self) -> None: ...

    def step(self) -> None: ...


class OwnForm(SGD):
    def state_dict(self) -> dict[str, Any]:
        return {"slow": {}, "base_optimizer": super().state_dict()}


class NeedsPlainTensors(SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                torch.add(p.detach(), torch.ones(p.shape))


class Draws(SGD):
    """Adds noise, as SGLD."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.add_(torch.randn(p.shape), alpha=0.01)


class TrainsBy(TinyTrainer):
    optimizer_class: type[SGD] = SGD

    def configure_optimizers(self) -> None:
        self.optimizer = self.optimizer_class(self.model.parameters(), lr=0.1)


class TrainsByDraws(TrainsBy):
    optimizer_class = Draws


class TrainsByPlainTensors(TrainsBy):
    optimizer_class = NeedsPlainTensors


class TrainsByOwnForm(TrainsBy):
    optimizer_class = OwnForm


class TrainsByWrapper(TinyTrainer):
    def configure_optimizers(self) -> None:
        self.base = SGD(self.model.parameters(), lr=0.1)
        self.optimizer = Wrapper(self.base)


def test_an_optimizer_of_another_class_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"self\.optimizer is a Wrapper, which has step\(\) and param_groups, but is"):
        TrainsByWrapper(_config(), world=ALONE).fit()


def test_a_state_dict_of_another_form_is_refused_if_the_run_saves(tmp_path: Path) -> None:
    assert TrainsByOwnForm(_config(), world=ALONE).fit().steps == 6
    with pytest.raises(ConfigError, match=r"has slow, base_optimizer, but no 'state' and no 'param_groups'"):
        TrainsByOwnForm(_config(), world=ALONE, run_dir=tmp_path / "run").fit()


class WithoutRate(SGD):
    """Has no learning rate, as transformers' Adafactor, and a count beside the state of the parameters, as SPAM."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.state["count"] = 0
        self.param_groups[0]["lr"] = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["count"] += 1
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.1 / self.state["count"])


class TrainsWithoutRate(TrainsBy):
    optimizer_class = WithoutRate


def test_an_optimizer_may_have_no_learning_rate_and_state_of_its_own(tmp_path: Path) -> None:
    whole = TrainsWithoutRate(_config(), world=ALONE)
    assert "lr" not in whole.fit().metrics
    options = {"world": ALONE, "run_dir": str(tmp_path / "run")}
    TrainsWithoutRate(
        _config(checkpoint=CheckpointConfig(every=Duration(1, "steps"))), callbacks=[StopAt(3)], **options
    ).fit()
    resumed = TrainsWithoutRate(_config(), **options)
    resumed.fit()
    assert resumed.optimizer.state["count"] == 6
    torch.testing.assert_close(weights(resumed), weights(whole), atol=0, rtol=0)


def _step_by_others(world: World, folder: str) -> dict[str, torch.Tensor]:
    with pytest.raises(RuntimeError) as raised:
        TrainsByPlainTensors(_config(parallel=ParallelConfig(strategy="fsdp")), world=world).fit()
    (note,) = raised.value.__notes__
    assert note.startswith("raised by NeedsPlainTensors.step(), whose parameters, gradients and state are shards")
    whole = TrainsByDraws(_config(), world=world, run_dir=f"{folder}/whole")
    whole.fit()
    TrainsByDraws(_config(), world=world, run_dir=f"{folder}/resumed", callbacks=[StopAt(3)]).fit()
    resumed = TrainsByDraws(_config(), world=world, run_dir=f"{folder}/resumed")
    resumed.fit()
    torch.testing.assert_close(weights(resumed), weights(whole), atol=0, rtol=0)
    return weights(whole)


def test_an_optimizer_draws_the_same_numbers_on_all_ranks(tmp_path: Path) -> None:
    one, other = run_on_ranks(_step_by_others, 2, str(tmp_path))
    torch.testing.assert_close(one, other, atol=0, rtol=0)


class Rotates(SGD):
    """Keeps eigenvectors, whose memory is in the order of columns, as Shampoo and SOAP."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            if p.dim() == 2:
                bases = self.state[p].setdefault("bases", [torch.linalg.eigh(p.grad @ p.grad.T).eigenvectors])
                p.sub_(bases[0] @ (bases[0].T @ p.grad), alpha=0.1)


class TrainsByRotations(TrainsBy):
    optimizer_class = Rotates


def test_state_in_another_order_of_memory_is_restored_in_that_order(tmp_path: Path) -> None:
    whole = TrainsByRotations(_config(width=33), world=ALONE)
    whole.fit()
    TrainsByRotations(_config(width=33), world=ALONE, run_dir=tmp_path / "run", callbacks=[StopAt(3)]).fit()
    resumed = TrainsByRotations(_config(width=33), world=ALONE, run_dir=tmp_path / "run")
    resumed.fit()
    (basis,) = resumed.optimizer.state[resumed.model.first.weight]["bases"]
    assert basis.stride() == (1, 33)
    torch.testing.assert_close(weights(resumed), weights(whole), atol=0, rtol=0)


class CountsInBoth(SGD):
    """Has one tensor as the count of a group and in the state of a parameter, as heavyball's optimizers."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        group["step_count"] = count = torch.as_tensor(group.get("step_count", 0)) + 1
        self.state[group["params"][0]]["step"] = count
        for p in group["params"]:
            p.sub_(p.grad, alpha=group["lr"] / float(count))


class TrainsByCounts(TrainsBy):
    optimizer_class = CountsInBoth


def test_a_tensor_in_two_places_of_the_state_may_be_two_tensors_after_loading(tmp_path: Path) -> None:
    whole = TrainsByCounts(_config(), world=ALONE)
    whole.fit()
    TrainsByCounts(_config(), world=ALONE, run_dir=tmp_path / "run", callbacks=[StopAt(3)]).fit()
    resumed = TrainsByCounts(_config(), world=ALONE, run_dir=tmp_path / "run")
    resumed.fit()
    torch.testing.assert_close(weights(resumed), weights(whole), atol=0, rtol=0)
