"""Evaluations: weighted by samples, every row once at any number of ranks, and the models left as they were."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from headway.trainer import Callback, ConfigError, DataError, ParallelConfig, StepError, World
from tests.distributed import run_on_ranks
from tests.tiny import Rows, TinyConfig, TinyTrainer

ALONE = World.single("cpu")


class Evaluates(TinyTrainer):
    """Evaluates on given data; its model has a BatchNorm, whose buffers DDP would broadcast."""

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
def test_metrics_do_not_depend_on_the_batch_size(batch_size: int) -> None:
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


def test_modes_and_gradients_are_as_before() -> None:
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
    """Records when an evaluation enters and exits its context."""

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


def test_contexts_of_callbacks_are_entered_around_every_evaluation() -> None:
    notes: list[str] = []
    trainer = Evaluates(_config(), data=[_collate([1, 2])], callbacks=[Around("a", notes), Around("b", notes)])
    trainer.evaluate()
    once = ["enter a", "enter b", "start", "start", "leave b", "leave a", "end", "end"]
    assert notes == once
    trainer.fit()
    assert notes == once * 2


def test_contexts_of_callbacks_are_left_after_an_error_too() -> None:
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
def test_an_error_of_a_context_names_its_callback_and_the_others_are_left(fails: str) -> None:
    notes: list[str] = []
    callbacks = [Around("a", notes), Around("b", notes, fails=fails)]
    trainer = Evaluates(_config(), data=[_collate([1])], callbacks=callbacks)
    with pytest.raises(LookupError) as caught:
        trainer.evaluate()
    assert caught.value.__notes__ == ["raised by Around.evaluation_context"]
    assert notes[-1] == "leave a"
    assert trainer.model.training


@pytest.mark.parametrize("where", ["step", "hook", "data"])
def test_modes_and_gradients_are_as_before_also_after_an_error(where: str) -> None:
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
    """An evaluation without metrics does not count as interrupted: the run continues."""
    result = _returning({})(_config(max_epochs=2), data=[_collate([1])]).fit()
    assert (result.status, result.epochs) == ("completed", 2)


def test_an_iterator_is_gone_after_one_evaluation() -> None:
    with pytest.raises(DataError, match="is an exhausted iterator"):
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


def test_a_plateau_scheduler_follows_evaluations() -> None:
    trainer = Plateau(_config(max_epochs=3, evaluate_every="1 epochs"), data=[_collate([1])])
    result = trainer.fit()
    assert trainer.scheduler.last_epoch == 3
    assert trainer.scheduler.best == min(row["validation/loss"] for row in result.history)
    trainer = Plateau(_config(), data=[_collate([1])])
    trainer.scheduler_monitor = "validation/perplexity"
    with pytest.raises(ConfigError, match="must be one of validation/accuracy, .* got 'validation/perplexity'"):
        trainer.fit()


@pytest.mark.parametrize(("interval", "moves"), [("step", 12), ("epoch", 3)])
def test_schedulers_move_per_step_or_per_epoch(interval: Any, moves: int) -> None:
    trainer = Evaluates(_config(max_epochs=3), data=[_collate([1])])
    trainer.scheduler_interval = interval
    trainer.fit()
    assert trainer.scheduler.last_epoch == moves


# ---- Several sets, and metrics that are no means -------------------------------------------------------------------


def test_several_sets_are_told_apart_by_name() -> None:
    seen: list[Any] = []

    class Looks(Callback):
        def on_evaluation_end(self, trainer: Any, metrics: Any) -> None:
            seen.append(set(metrics))

    class Logs(Evaluates):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("rows", float(len(batch["id"])))
            return super().validation_step(batch, batch_idx)

    sets = {"held_out": DataLoader(Rows(10), batch_size=3), "news": [_collate([1]), _collate([2, 3])], "off": None}
    trainer = Logs(_config(), data=sets, callbacks=[Looks()])
    result = trainer.fit()
    names = {f"validation/{name}/{each}" for name in ("held_out", "news") for each in ("loss", "accuracy", "rows")}
    assert seen == [names], "one evaluation, over all sets"
    alone = trainer.evaluate(sets["news"])
    assert result.metrics["validation/news/loss"] == pytest.approx(alone["validation/loss"], rel=1e-6)
    assert result.metrics["validation/news/rows"] == pytest.approx(5 / 3)
    assert trainer.evaluate({"x": sets["news"]}) == {
        name.replace("validation/", "validation/x/"): value for name, value in alone.items()
    }
    with pytest.raises(ConfigError, match="names of validation sets must be .* got 1"):
        trainer.evaluate({1: sets["news"]})


class Reference:
    """A minimal metric with update, compute and reset: the largest gap between consecutive rows."""

    def reset(self) -> None:
        self.rows: list[int] = []

    def update(self, rows: torch.Tensor) -> None:
        self.rows += rows.tolist()

    def compute(self) -> float:
        return float(max(b - a for a, b in zip(self.rows[:-1], self.rows[1:], strict=True)))


def _metrics() -> dict[str, Any]:
    import torchmetrics  # takes seconds, on every rank

    classification, several = {"task": "multiclass", "num_classes": 3}, {"average": "macro"}
    return {
        "f1": torchmetrics.F1Score(**classification, **several),
        "auroc": torchmetrics.AUROC(**classification),  # its states are lists of rows
        "pearson": torchmetrics.PearsonCorrCoef(),  # its states do not add up
        "both": torchmetrics.MetricCollection(
            {"recall": torchmetrics.Recall(**classification), "precision": torchmetrics.Precision(**classification)}
        ),
        "order": Reference(),
        "ids": lambda ids, names, *, scale: {"last": ids[-1] * scale[0], "num": len(ids), "named": len(names)},
    }


class Measures(Evaluates):
    def configure_metrics(self) -> Any:
        return _metrics()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.model(batch["x"])
        for name in ("f1", "auroc", "both"):
            self.metrics[name].update(logits.softmax(1), batch["y"])
        self.metrics["pearson"].update(logits[:, 0], batch["x"][:, 0])
        self.metrics["order"].update(batch["id"])
        self.metrics["ids"].update(batch["id"], [f"row {row}" for row in batch["id"]], scale=2.0)
        return super().training_step(batch, batch_idx)


def _by_hand(trainer: Measures, rows: list[int]) -> dict[str, float]:
    metrics, batch = _metrics(), _collate(rows)
    trainer.model.eval()
    with torch.no_grad():
        logits = trainer.unwrap(trainer.model)(batch["x"])
    for name in ("f1", "auroc", "both"):
        metrics[name].update(logits.softmax(1), batch["y"])
    metrics["pearson"].update(logits[:, 0], batch["x"][:, 0])
    both = {f"both/{name}": value for name, value in metrics["both"].compute().items()}
    found = {name: metrics[name].compute() for name in ("f1", "auroc", "pearson")} | both
    gap = float(max(b - a for a, b in zip(rows[:-1], rows[1:], strict=True)))
    found |= {"order": gap, "ids/last": rows[-1] * 2.0, "ids/num": len(rows), "ids/named": len(rows)}
    return {f"validation/{name}": float(value) for name, value in found.items()}


@pytest.mark.filterwarnings("ignore:No .* samples in targets")  # of three rows only
def test_metric_objects_see_every_row_of_each_set() -> None:
    trainer = Measures(_config())
    assert trainer.evaluate(DataLoader(Rows(10), batch_size=3)).items() >= _approx(_by_hand(trainer, list(range(10))))
    batches = {"a": [_collate([1, 2, 3])], "b": [_collate([7, 4, 5, 6, 8, 9])]}
    metrics = trainer.evaluate(batches)
    for name, rows in (("a", [1, 2, 3]), ("b", [7, 4, 5, 6, 8, 9])):
        wanted = {key.replace("/", f"/{name}/", 1): value for key, value in _by_hand(trainer, rows).items()}
        assert metrics.items() >= _approx(wanted)


def _approx(metrics: dict[str, float]) -> Any:
    return {name: pytest.approx(value, rel=1e-5) for name, value in metrics.items()}.items()


def test_metric_objects_count_nothing_in_training() -> None:
    class Always(Evaluates):
        def configure_metrics(self) -> Any:
            return {"rows": lambda ids: len(ids), "unused": lambda ids: 1 / 0}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.metrics["rows"].update(batch["id"])
            return super().training_step(batch, batch_idx)

    result = Always(_config(max_epochs=2), data=DataLoader(Rows(10), batch_size=4)).fit()
    assert [row["validation/rows"] for row in result.history] == [10, 10]
    assert "validation/unused" not in result.metrics, "what got no update has no value"


@pytest.mark.parametrize(
    ("metrics", "error", "message"),
    [
        ({"loss": lambda ids: 1.0}, ConfigError, "validation/loss: both validation_step and configure_metrics"),
        ({"f1": 3}, ConfigError, "metric 'f1' must be an object with update, compute and reset.* got 3"),
        ({"f1": Reference}, ConfigError, "metric 'f1' must be .* got <class"),
        ({"all": lambda ids: ids}, StepError, r"metric 'all' must compute a number .* got a Tensor of shape \[2\]"),
    ],
)
def test_metric_objects_that_make_no_sense_are_refused(metrics: Any, error: type[Exception], message: str) -> None:
    class Wrong(Evaluates):
        def configure_metrics(self) -> Any:
            return metrics

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            for metric in self.metrics.values():
                metric.update(batch["id"])
            return super().validation_step(batch, batch_idx)

    with pytest.raises(error, match=message):
        Wrong(_config()).evaluate([_collate([1, 2])])


# ---- When ----------------------------------------------------------------------------------------------------------


class Counts(Callback):
    """At which updates evaluations were made, and of how many batches."""

    def __init__(self) -> None:
        self.evaluations: list[list[int]] = []

    def on_evaluation_start(self, trainer: Any) -> None:
        self.evaluations.append([trainer.global_step, 0])

    def on_evaluation_batch_end(self, trainer: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.evaluations[-1][1] += 1


def test_a_rehearsal_comes_before_the_first_update_and_leaves_nothing(tmp_path: Path) -> None:
    """A sanity check raises for a broken step; otherwise it calls no hooks and changes nothing."""

    class Rehearses(Plateau):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.evaluated: list[tuple[int, list[int]]] = []

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            torch.rand(3)
            self.evaluated.append((self.global_step, batch["id"].tolist()))
            return super().validation_step(batch, batch_idx)

    def run(sanity_batches: int, run_dir: Path) -> tuple[Any, Rehearses, Counts]:
        counts = Counts()
        data = {"a": DataLoader(Rows(10), batch_size=2), "b": DataLoader(Rows(10), batch_size=5)}
        config = _config(dropout=0.5, noise=0.1, sanity_batches=sanity_batches, max_epochs=1)
        trainer = Rehearses(config, data=data, run_dir=run_dir, callbacks=[counts])
        trainer.scheduler_monitor = "validation/a/loss"
        return trainer.fit(), trainer, counts

    result, trainer, counts = run(2, tmp_path / "with")
    assert trainer.evaluated[:4] == [(0, [0, 1]), (0, [2, 3]), (0, [0, 1, 2, 3, 4]), (0, [5, 6, 7, 8, 9])]
    assert counts.evaluations == [[4, 7]]
    assert trainer.progress.evaluations == trainer.scheduler.last_epoch == 1
    without, _, _ = run(0, tmp_path / "without")
    assert result.metrics["validation/a/loss"] == without.metrics["validation/a/loss"]
    lines = [json.loads(line) for line in (tmp_path / "with" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [4]
    again, trainer, _ = run(2, tmp_path / "with")
    assert (again.steps, trainer.evaluated) == (4, []), "only on fresh runs"


def test_a_broken_validation_step_shows_before_the_first_update() -> None:
    class Broken(Evaluates):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            raise LookupError("no such key")

    trainer = Broken(_config(sanity_batches=1), data=[_collate([1])])
    with pytest.raises(LookupError):
        trainer.fit()
    assert (trainer.global_step, trainer.model.training, trainer.training) == (0, True, True)


def test_an_evaluation_at_the_start_is_one_like_any_other(tmp_path: Path) -> None:
    counts = Counts()
    data = DataLoader(Rows(10), batch_size=2)
    config = _config(evaluate_at_start=True, evaluate_batches=3, evaluate_every="2 steps")
    Evaluates(config, data=data, run_dir=tmp_path, callbacks=[counts]).fit()
    assert counts.evaluations == [[0, 3], [2, 3], [4, 3]]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 2, 4]
    resumed = Counts()
    Evaluates(_config(max_epochs=2, evaluate_at_start=True), data=data, run_dir=tmp_path, callbacks=[resumed]).fit()
    assert resumed.evaluations == [[8, 5]], "a resumed run has made it"


@pytest.mark.parametrize("name", ["evaluate_batches", "sanity_batches"])
def test_numbers_of_batches_are_whole(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be an integer >= 1, got -1"):
        _config(**{name: -1})


EMPTY = [lambda: iter([]), [], DataLoader(Rows(0)), DataLoader(Rows(0), num_workers=1)]


@pytest.mark.parametrize("empty", EMPTY, ids=["function", "list", "loader", "loader with a worker"])
def test_data_that_is_empty_gives_no_metric_and_a_warning(empty: Any) -> None:
    """No data never becomes a loss of zero."""
    trainer = Plateau(_config(), data={"empty": empty, "full": [_collate([1])]})
    trainer.scheduler_monitor = "validation/full/loss"
    with pytest.warns(UserWarning, match="the validation data 'empty' has no batches: it is skipped"):
        result = trainer.fit()
    assert {name for name in result.metrics if name.startswith("validation/")} == {
        "validation/full/loss",
        "validation/full/accuracy",
    }
    with pytest.warns(UserWarning, match="the validation data has no batches"):
        alone = Plateau(_config(), data=empty).fit()
    assert alone.status == "completed"
    assert not any(name.startswith("validation/") for name in alone.metrics)


# ---- On ranks ------------------------------------------------------------------------------------------------------


def _measure_on_ranks(world: World, strategy: str) -> list[dict[str, float]]:
    """Rows that do not share out evenly, a rank that has none, and a rank that repeats a batch to keep in step."""
    config = _config(parallel=ParallelConfig(strategy=strategy))  # type: ignore[arg-type]
    trainer = Measures(config, world=world)
    few = DataLoader(torch.utils.data.Subset(Rows(10), range(3)), batch_size=1)
    own = [_collate([0, 1, 2, 3]), _collate([4, 5])] if world.rank == 0 else [_collate([6 + world.rank])]
    return [trainer.evaluate(DataLoader(Rows(10), batch_size=3)), trainer.evaluate(few), trainer.evaluate(own)]


@pytest.mark.filterwarnings("ignore:No .* samples in targets")  # of three rows only
@pytest.mark.parametrize(("world_size", "strategy"), [(2, "ddp"), pytest.param(4, "fsdp", marks=pytest.mark.extended)])
def test_metric_objects_are_exact_at_every_number_of_ranks(world_size: int, strategy: str) -> None:
    alone = Measures(_config())
    alone.setup()
    own = [0, 1, 2, 3, *(6 + rank for rank in range(1, world_size)), 4, 5]
    wanted = [_by_hand(alone, list(range(10))), _by_hand(alone, [0, 1, 2]), _by_hand(alone, own)]
    found = run_on_ranks(_measure_on_ranks, world_size, strategy)
    for metrics in found:
        assert metrics == found[0], "equal on every rank, to the last bit"
    for metrics, by_hand in zip(found[0], wanted, strict=True):
        assert metrics.items() >= _approx(by_hand)


def _evaluate_on_ranks(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for strategy in ("ddp", "fsdp"):
        config = _config(parallel=ParallelConfig(strategy=strategy))  # type: ignore[arg-type]
        trainer = Evaluates(config, world=world, data=DataLoader(Rows(10), batch_size=3))
        found[f"{strategy}/exact"] = trainer.evaluate()
        # Each rank brings its own: five batches and two, of one and of three rows.
        own = [_collate([row]) for row in range(5)] if world.rank % 2 == 0 else [_collate([5, 6, 7]), _collate([8, 9])]
        found[f"{strategy}/uneven"] = trainer.evaluate(own)
        with pytest.raises(
            DataError, match="no batches on one rank, but some on another: give every rank at least one"
        ):
            trainer.evaluate(lambda: iter(own if world.rank else []))  # noqa: B023
        found[f"{strategy}/after"] = trainer.evaluate()
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_row_counts_once_at_every_number_of_ranks(world_size: int) -> None:
    wanted = Evaluates(_config()).evaluate(DataLoader(Rows(10), batch_size=10))
    for rank in run_on_ranks(_evaluate_on_ranks, world_size):
        for name, metrics in rank.items():
            assert metrics == pytest.approx(wanted, rel=1e-5), name
