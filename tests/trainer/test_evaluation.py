"""Evaluations: weighted by samples, every row once at any number of ranks, and the models left as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from headway.trainer import Callback, ConfigError, DataError, ParallelConfig, StepError, World
from tests.distributed import run_on_ranks
from tests.tiny import Rows, TinyConfig, TinyTrainer

ALONE = World.alone("cpu")


class Evaluates(TinyTrainer):
    """Evaluates on what it is given; its model has a BatchNorm, whose buffers DDP would send around."""

    def __init__(self, *args: Any, data: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **{"world": ALONE, **kwargs})
        self.data = data

    def configure_models(self) -> None:
        super().configure_models()
        self.model.dropout = nn.Sequential(nn.BatchNorm1d(self.config.width), nn.Dropout(0.5))

    def configure_dataloaders(self) -> Any:
        return super().configure_dataloaders()[0], self.data


def _config(**changes: Any) -> TinyConfig:
    return TinyConfig(**{"num_rows": 32, "max_epochs": 1, "width": 4, **changes})


def _collate(rows: range | list[int]) -> Any:
    data = Rows(10)
    return torch.utils.data.default_collate([data[row] for row in rows])


@pytest.mark.parametrize("batch_size", [1, 3, 4, 10, 64])
def test_metrics_do_not_depend_on_the_batch_size_F2(batch_size: int) -> None:
    trainer = Evaluates(_config())
    metrics = trainer.evaluate(DataLoader(Rows(10), batch_size=batch_size))
    batch = _collate(range(10))
    trainer.model.eval()
    with torch.no_grad():
        wanted = F.cross_entropy(trainer.model(batch["x"]), batch["y"]).item()
    assert metrics["validation/loss"] == pytest.approx(wanted, rel=1e-6)
    assert set(metrics) == {"validation/loss", "validation/accuracy"}


class Tokens(Evaluates):
    def loss_weight(self, batch: Any) -> torch.Tensor:
        return batch["id"].sum()  # type: ignore[no-any-return]


def test_own_weights_hold_in_evaluations() -> None:
    """Row i weighs i: the row that weighs nothing does not count."""
    trainer = Tokens(_config())
    each = [trainer.evaluate([_collate([row])]).get("validation/loss") for row in range(10)]
    assert each[0] is None
    wanted = sum(row * each[row] for row in range(1, 10)) / 45
    assert trainer.evaluate(DataLoader(Rows(10)))["validation/loss"] == pytest.approx(wanted, rel=1e-6)


class Frozen(Evaluates):
    def configure_models(self) -> None:
        super().configure_models()
        self.model.first.eval()
        self.teacher = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).eval()

    def modes(self) -> dict[str, bool]:
        return {name: module.training for name, module in (*self.model.named_modules(), ("t", self.teacher[1]))}


def test_modes_and_gradients_are_as_before_F3() -> None:
    inside: list[Any] = []

    class Looks(Callback):
        def on_evaluation_batch_start(self, trainer: Any, batch: Any, batch_idx: int) -> None:
            inside.append((torch.is_grad_enabled(), any(trainer.modes().values()), trainer.training))

    trainer = Frozen(_config(), data=[_collate([1, 2])], callbacks=[Looks()])
    trainer.setup()
    before = trainer.modes()
    assert before[""] is True
    assert before["first"] is before["t"] is False
    buffers = {name: value.clone() for name, value in trainer.model.named_buffers()}
    trainer.evaluate()
    assert inside == [(False, False, False)]
    assert trainer.modes() == before
    assert all(torch.equal(value, buffers[name]) for name, value in trainer.model.named_buffers())
    trainer.fit()
    assert trainer.modes() == before
    assert torch.is_grad_enabled()
    assert trainer.training


class Around(Callback):
    """Notes when an evaluation enters and leaves its context."""

    def __init__(self, name: str, notes: list[str], *, fails: str = "") -> None:
        self.name, self.notes, self.fails = name, notes, fails

    @contextmanager
    def evaluation_context(self, trainer: Any) -> Iterator[None]:
        if self.fails == "entering":
            raise LookupError("no such weights")
        assert not trainer.training
        assert not torch.is_grad_enabled()
        self.notes.append(f"enter {self.name}")
        try:
            yield
        finally:
            self.notes.append(f"leave {self.name}")
        if self.fails == "leaving":
            raise LookupError("no way back")

    def on_evaluation_start(self, trainer: Any) -> None:
        self.notes.append("start")

    def on_evaluation_end(self, trainer: Any, metrics: Any) -> None:
        assert trainer.training
        self.notes.append("end")


def test_contexts_of_callbacks_are_entered_around_every_evaluation_F3() -> None:
    notes: list[str] = []
    trainer = Evaluates(_config(), data=[_collate([1, 2])], callbacks=[Around("a", notes), Around("b", notes)])
    trainer.evaluate()
    once = ["enter a", "enter b", "start", "start", "leave b", "leave a", "end", "end"]
    assert notes == once
    trainer.fit()
    assert notes == once * 2


def test_contexts_of_callbacks_are_left_after_an_error_too_F3() -> None:
    class Fails(Evaluates):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            raise LookupError("in the step")

    notes: list[str] = []
    trainer = Fails(_config(), data=[_collate([1])], callbacks=[Around("a", notes), Around("b", notes)])
    with pytest.raises(LookupError, match="in the step") as caught:
        trainer.evaluate()
    assert notes == ["enter a", "enter b", "start", "start", "leave b", "leave a"]
    assert not hasattr(caught.value, "__notes__")
    assert trainer.training
    assert trainer.model.training


@pytest.mark.parametrize("fails", ["entering", "leaving"])
def test_an_error_of_a_context_names_its_callback_and_the_others_are_left_C10(fails: str) -> None:
    notes: list[str] = []
    callbacks = [Around("a", notes), Around("b", notes, fails=fails)]
    trainer = Evaluates(_config(), data=[_collate([1])], callbacks=callbacks)
    with pytest.raises(LookupError) as caught:
        trainer.evaluate()
    assert caught.value.__notes__ == ["raised by Around.evaluation_context"]
    assert notes[-1] == "leave a"
    assert trainer.model.training


@pytest.mark.parametrize("where", ["step", "hook", "data"])
def test_modes_and_gradients_are_as_before_also_after_an_error_F3(where: str) -> None:
    class Hook(Callback):
        def on_evaluation_start(self, trainer: Any) -> None:
            if where == "hook":
                raise LookupError("in the hook")

    class Fails(Frozen):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            raise LookupError("in the step")

    def broken() -> Iterator[Any]:
        raise LookupError("in the data")
        yield

    trainer = Fails(_config(), data=broken if where == "data" else [_collate([1])], callbacks=[Hook()])
    trainer.setup()
    before = trainer.modes()
    with pytest.raises(LookupError, match=f"in the {where}"):
        trainer.evaluate()
    assert trainer.modes() == before
    assert trainer.training
    assert torch.is_grad_enabled()


def _returning(value: Any) -> type[Evaluates]:
    class Returns(Evaluates):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return value

    return Returns


@pytest.mark.parametrize(("value", "message"), [(None, "returned nothing; it must return"), ("good", "returned a str")])
def test_a_step_must_return_numbers(value: Any, message: str) -> None:
    with pytest.raises(StepError, match=message):
        _returning(value)(_config()).evaluate([_collate([1])])


def test_a_step_may_have_nothing_to_say() -> None:
    """An evaluation without metrics is none that was cut short: the run goes on."""
    result = _returning({})(_config(max_epochs=2), data=[_collate([1])]).fit()
    assert (result.status, result.epochs) == ("completed", 2)


def test_an_iterator_is_gone_after_one_evaluation() -> None:
    with pytest.raises(DataError, match="was an iterator that has run out"):
        Evaluates(_config(max_epochs=2), data=iter([_collate([1])])).fit()


def test_evaluate_every_none_evaluates_at_the_end() -> None:
    trainer = Evaluates(_config(max_epochs=3, evaluate_every=None), data=[_collate([1])])
    assert trainer.fit().metrics["validation/loss"] > 0
    assert trainer.progress.evaluations == 1


class Plateau(Evaluates):
    scheduler_monitor = "validation/loss"

    def configure_optimizers(self) -> None:
        super().configure_optimizers()
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=100)


def test_a_plateau_scheduler_follows_evaluations_H2() -> None:
    trainer = Plateau(_config(max_epochs=3, evaluate_every="1 epochs"), data=[_collate([1])])
    result = trainer.fit()
    assert trainer.scheduler.last_epoch == 3
    assert trainer.scheduler.best == min(row["validation/loss"] for row in result.history)
    trainer = Plateau(_config(), data=[_collate([1])])
    trainer.scheduler_monitor = "validation/perplexity"
    with pytest.raises(ConfigError, match="'validation/perplexity', but an evaluation gives validation/accuracy"):
        trainer.fit()


@pytest.mark.parametrize(("interval", "moves"), [("step", 12), ("epoch", 3)])
def test_schedulers_move_per_step_or_per_epoch_H2(interval: Any, moves: int) -> None:
    trainer = Evaluates(_config(max_epochs=3), data=[_collate([1])])
    trainer.scheduler_interval = interval
    trainer.fit()
    assert trainer.scheduler.last_epoch == moves


# ---- On ranks ------------------------------------------------------------------------------------------------------


def _evaluate_on_ranks(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for strategy in ("ddp", "fsdp"):
        config = _config(parallel=ParallelConfig(strategy=strategy))  # type: ignore[arg-type]
        trainer = Evaluates(config, world=world, data=DataLoader(Rows(10), batch_size=3))
        found[f"{strategy}/exact"] = trainer.evaluate()
        # Each rank brings its own: five batches and two, of one and of three rows.
        own = [_collate([row]) for row in range(5)] if world.rank % 2 == 0 else [_collate([5, 6, 7]), _collate([8, 9])]
        found[f"{strategy}/uneven"] = trainer.evaluate(own)
        with pytest.raises(DataError, match="validation data of some rank has no batches"):
            trainer.evaluate(lambda: iter(own if world.rank else []))  # noqa: B023
        found[f"{strategy}/after"] = trainer.evaluate()
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_row_counts_once_at_every_number_of_ranks_E7_F2(world_size: int) -> None:
    wanted = Evaluates(_config()).evaluate(DataLoader(Rows(10), batch_size=10))
    for rank in run_on_ranks(_evaluate_on_ranks, world_size):
        for name, metrics in rank.items():
            assert metrics == pytest.approx(wanted, rel=1e-5), name
