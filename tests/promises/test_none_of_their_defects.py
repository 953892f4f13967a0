"""Defects of four other trainers, which Headway must not have; most are tested next to the code in question.

The ids are those of the inventory of defects: D of Dream Trainer, E of EasyDeL, M of mini.trainer, Q of qurious.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway.trainer import (
    Callback,
    CheckpointConfig,
    ConfigError,
    Duration,
    ParallelConfig,
    StepError,
    SupervisedTrainer,
    Trainer,
    TrainerConfig,
    World,
    callbacks,
    trackers,
)
from headway.trainer.callbacks import EarlyStopping, Ema
from headway.trainer.checkpoints.scan import read_checkpoint
from tests.tiny import Losses, StopAt, TinyConfig, TinyTrainer, weights

ALONE = World.single("cpu")


def _config(**changes: Any) -> TinyConfig:
    """Four updates of 8 rows in an epoch."""
    return TinyConfig(**{"num_rows": 32, "log_every": "1 steps", "checkpoint": CheckpointConfig(every=None), **changes})


class Does(Callback):
    """Calls a function after a given update."""

    def __init__(self, step: int, function: Callable[[], Any]) -> None:
        self.step, self.function = step, function

    def on_step_end(self, trainer: Trainer[Any]) -> None:
        if trainer.global_step == self.step:
            self.function()


# ---- Endings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [SystemExit(143), KeyboardInterrupt(), TypeError("None is no state")], ids=repr)
@pytest.mark.parametrize("where", ["hook", "function", "tracker"])
def test_no_exception_is_swallowed_and_none_ends_only_its_epoch(error: BaseException, where: str) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    class Fails(trackers.Tracker):
        log = fail

    trainer = TinyTrainer(
        _config(max_epochs=3),
        world=ALONE,
        callbacks={"hook": [Does(2, fail)], "function": [lambda trainer, epoch, metrics: fail()]}.get(where, []),
        trackers=[Fails()] if where == "tracker" else [],
    )
    if where == "tracker" and isinstance(error, Exception):
        # A record that cannot be written causes a warning; it does not end the run.
        with pytest.warns(UserWarning, match="Fails"):
            assert trainer.fit().steps == 12
        return
    with pytest.raises(type(error)) as raised:
        trainer.fit()
    assert raised.value is error
    assert trainer.global_step == {"hook": 2, "function": 4, "tracker": 1}[where], "no further update, no next epoch"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_the_signal_that_came_is_the_one_that_is_told(name: str, tmp_path: Path) -> None:
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    kill = Does(2, lambda: os.kill(os.getpid(), getattr(signal, name)))
    result = TinyTrainer(_config(max_epochs=3), run_dir=tmp_path, world=ALONE, callbacks=[kill]).fit()
    assert result.status == "interrupted"
    assert name in result.reason
    assert result.last_checkpoint is not None
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == handlers


# ---- Data and resume ------------------------------------------------------------------------------------------------


def test_data_that_ends_before_max_steps_is_read_again_and_the_end_is_in_order(tmp_path: Path) -> None:
    ends: list[Any] = []

    class Ends(Callback):
        def on_fit_end(self, trainer: Trainer[Any], error: BaseException | None) -> None:
            ends.append(error)

    trainer = TinyTrainer(_config(max_steps=10), run_dir=tmp_path, world=ALONE, callbacks=[Ends()])
    result = trainer.fit()
    assert (result.status, result.steps, result.epochs) == ("completed", 10, 2)
    assert ends == [None]
    assert result.last_checkpoint is not None
    assert read_checkpoint(result.last_checkpoint).step == 10
    first, second = ([row for _, rows in trainer.seen[i : i + 4] for row in rows] for i in (0, 4))
    assert sorted(first) == sorted(second) == list(range(32))
    assert first != second


def test_what_is_built_anew_goes_on_where_the_other_stood(tmp_path: Path) -> None:
    before = TinyTrainer(_config(max_epochs=2), run_dir=tmp_path, world=ALONE, callbacks=[StopAt(3)])
    before.fit()
    after = TinyTrainer(_config(max_epochs=2), run_dir=tmp_path, world=ALONE)
    result = after.fit()
    assert (result.steps, result.epochs) == (8, 2), "epochs are a total"
    assert [step for step, _ in after.seen] == [3, 4, 5, 6, 7]
    rows = [row for _, each in (*before.seen, *after.seen[:1]) for row in each]
    assert sorted(rows) == list(range(32)), "the epoch in progress is completed, not begun again"


def test_a_run_begins_again_at_an_older_checkpoint_and_saves_over_the_later_ones(tmp_path: Path) -> None:
    config = _config(max_steps=6, checkpoint=CheckpointConfig(every=Duration(2), keep_last="all"))
    TinyTrainer(config, run_dir=tmp_path, world=ALONE).fit()
    (oldest, *_) = sorted(tmp_path.glob("checkpoints/step-*"))
    result = TinyTrainer(config, run_dir=tmp_path, world=ALONE).fit(resume=str(oldest))
    assert (result.status, result.steps) == ("completed", 6)
    assert sorted(read_checkpoint(each).step for each in tmp_path.glob("checkpoints/step-*")) == [2, 4, 6]


class Scored(TinyTrainer):
    """Evaluations return these scores in turn; None stands for one without rows."""

    scores: tuple[float, ...] = ()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"score": self.scores[self.progress.evaluations]}


def _scored(*scores: float) -> type[Scored]:
    return type("Scored", (Scored,), {"scores": scores})


SCORE = CheckpointConfig(monitor="validation/score", mode="max", every=Duration(1), keep_last="all")


def test_a_metric_to_maximise_has_a_best_and_does_not_stop_early(tmp_path: Path) -> None:
    stopping = EarlyStopping("validation/score", mode="max", patience=2)
    config = _config(max_steps=5, evaluate_every=1, checkpoint=SCORE)
    trainer = _scored(0.1, 0.2, 0.5, 0.3, 0.6)(config, run_dir=tmp_path, world=ALONE, callbacks=[stopping])
    result = trainer.fit()
    assert (result.status, result.best_metric, result.best_step) == ("completed", pytest.approx(0.6), 5)


def test_a_resume_goes_on_from_the_newest_and_remembers_best_and_patience(tmp_path: Path) -> None:
    config = _config(max_steps=8, evaluate_every=1, checkpoint=SCORE)
    scores = _scored(0.1, 0.9, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)

    def train(*more: Callback) -> Any:
        stopping = EarlyStopping("validation/score", mode="max", patience=4)
        return scores(config, run_dir=tmp_path, world=ALONE, callbacks=[stopping, *more]).fit()

    assert train(StopAt(4)).best_step == 2
    result = train()
    assert result.resumed_from is not None
    assert read_checkpoint(result.resumed_from).step == 4
    assert (result.best_metric, result.best_step) == (pytest.approx(0.9), 2)
    assert read_checkpoint(result.best_checkpoint).step == 2
    assert (result.status, result.steps) == ("stopped", 6), "the third to the sixth score were no gain"


@pytest.mark.parametrize("order", ["average first", "average last"])
def test_the_place_of_an_average_among_the_callbacks_does_not_matter(order: str, tmp_path: Path) -> None:
    def train(run_dir: Path | None, *more: Callback) -> dict[str, torch.Tensor]:
        average = Ema(decay=0.5)
        each = [average, *more] if order == "average first" else [*more, average]
        TinyTrainer(_config(max_epochs=2), run_dir=run_dir, world=ALONE, callbacks=each).fit()
        return average.weights()["model"]

    train(tmp_path, Losses(), StopAt(3))
    resumed, whole = train(tmp_path, Losses()), train(None)
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


def test_an_average_moves_once_for_all_micro_batches_of_an_update() -> None:
    average, seen = Ema(decay=0.75), []

    class Note(Callback):
        def on_step_start(self, trainer: Trainer[Any]) -> None:
            seen.append(weights(trainer))

    config = _config(max_steps=3, gradient_accumulation_steps=4, batch_size=2)
    trainer = TinyTrainer(config, world=ALONE, callbacks=[Note(), average])
    trainer.fit()
    for name, value in average.weights()["model"].items():
        expected = seen[0][f"model.{name}"]
        for each in (*seen[1:], weights(trainer)):
            expected = 0.75 * expected + 0.25 * each[f"model.{name}"]
        torch.testing.assert_close(value, expected)


def _supervised(
    run_dir: Path, model: nn.Module, batches: Any, *watching: Callback, max_epochs: int = 2
) -> SupervisedTrainer:
    return SupervisedTrainer(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        train=batches,
        loss_fn=nn.functional.mse_loss,
        config=TrainerConfig(max_epochs=max_epochs),
        callbacks=watching,
        run_dir=run_dir,
        world=ALONE,
    )


def test_training_after_a_load_changes_the_model_that_was_given(tmp_path: Path) -> None:
    rows = DataLoader(TensorDataset(torch.randn(16, 2), torch.randn(16, 1)), batch_size=4)
    _supervised(tmp_path, nn.Linear(2, 1), rows).fit()
    model, restored = nn.Linear(2, 1), []

    class Note(Callback):
        def on_restored(self, trainer: Trainer[Any]) -> None:
            restored.append(model.weight.detach().clone())

    trainer = _supervised(tmp_path, model, rows, Note(), max_epochs=3)
    assert trainer.fit().steps == 12
    assert trainer.model.weight is model.weight
    assert not torch.equal(restored[0], model.weight)


# ---- Input and output -----------------------------------------------------------------------------------------------


def test_batches_are_not_changed_and_nothing_in_them_is_dropped(tmp_path: Path) -> None:
    class Counts(SupervisedTrainer):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            lengths.append(len(batch))
            return super().training_step(batch[:2], batch_idx)

    lengths: list[int] = []
    triple = (torch.randn(4, 2), torch.randn(4, 1), ["a", "b", "c", "d"])
    model = nn.Linear(2, 1)
    options: dict[str, Any] = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "world": ALONE}
    options |= {"model": model, "loss_fn": nn.functional.mse_loss, "config": TrainerConfig(max_epochs=1)}
    Counts(train=[triple], **options).fit()
    assert lengths == [3]
    named = {"input": torch.randn(4, 2), "labels": torch.randn(4, 1)}
    before = dict(named)
    _supervised(tmp_path, nn.Linear(2, 1), [named]).fit()
    assert named.keys() == before.keys()
    assert all(named[name] is value for name, value in before.items())
    for batch in (triple, (torch.randn(4, 2),)):
        with pytest.raises(StepError, match="loss_fn needs targets"):
            SupervisedTrainer(train=[batch], **options).fit()


def test_what_a_hook_logs_after_an_update_is_in_the_record_of_that_update() -> None:
    class Adds(Callback):
        def on_step_end(self, trainer: Trainer[Any]) -> None:
            trainer.log("mine", float(trainer.global_step))

    losses = Losses()
    TinyTrainer(_config(max_steps=3), world=ALONE, callbacks=[Adds(), losses]).fit()
    assert losses.of("train/mine") == {1: 1.0, 2: 2.0, 3: 3.0}


@pytest.mark.parametrize(("text", "seconds"), [("1d", 86400), ("2h30m", 9000), ("90m", 5400)])
def test_durations_are_what_they_say(text: str, seconds: float) -> None:
    assert Duration.parse(text) == Duration(seconds, "seconds")


def test_a_duration_that_is_none_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="2 months"):
        callbacks.TimeLimit("2 months")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -3.0])
def test_any_value_of_a_metric_gives_a_checkpoint_that_is_found_again(value: float, tmp_path: Path) -> None:
    config = _config(max_steps=2, evaluate_every=1, checkpoint=SCORE)
    _scored(value, value)(config, run_dir=tmp_path, world=ALONE).fit()
    result = _scored(value, value)(config, run_dir=tmp_path, world=ALONE).fit()
    assert result.resumed_from is not None
    assert read_checkpoint(result.resumed_from).step == 2
    assert result.best_metric == (pytest.approx(value) if math.isfinite(value) else None)


# ---- Names and fields ----------------------------------------------------------------------------------------------


def _makes_itself(made: Any) -> bool:
    if not inspect.isclass(made):
        return False
    parameters = inspect.signature(made).parameters.values()
    return all(
        each.default is not each.empty or each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters
    )


PUBLIC = [getattr(module, name) for module in (callbacks, trackers) for name in module.__all__]


@pytest.mark.parametrize("made", [each for each in PUBLIC if _makes_itself(each)], ids=lambda made: made.__name__)
def test_what_needs_no_argument_can_be_made_without_one(made: Callable[[], Any]) -> None:
    made()


@pytest.mark.parametrize("config", [TrainerConfig, ParallelConfig, CheckpointConfig])
def test_no_field_of_a_config_is_without_effect(config: type) -> None:
    """Each is read somewhere."""
    folder = Path(inspect.getfile(TrainerConfig)).parent
    code = "\n".join(file.read_text() for file in folder.rglob("*.py") if file.name != "config.py")
    fields = [each.name for each in dataclasses.fields(config)]
    assert [name for name in fields if not re.search(rf"(config|parallel|checkpoint)\.{name}\b", code)] == []
