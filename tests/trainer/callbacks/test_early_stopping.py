"""Early stopping: counts evaluations, ignores NaN, and is reported in the result."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from headway.trainer import Callback, CheckpointConfig, ConfigError, FitResult, World
from headway.trainer.callbacks import EarlyStopping
from tests.distributed import run_on_ranks
from tests.tiny import StopAt, TinyConfig, TinyTrainer
from tests.trainer.checkpoints.test_retention import Scripted

NAN, INF = math.nan, math.inf
ALONE = World.single("cpu")


def _config(**changes: Any) -> TinyConfig:
    return TinyConfig(**{"num_rows": 400, "max_steps": 20, "evaluate_every": "2 steps", **changes})


def _fit(values: list[float], callback: EarlyStopping, **options: Any) -> FitResult:
    return Scripted(_config(), values=values, callbacks=[callback], **options).fit()


def test_patience_of_two_stops_right_after_the_fourth_evaluation() -> None:
    stopping = EarlyStopping("validation/loss", mode="min", patience=2)
    result = _fit([1.0, 0.9, 0.9, 0.95, 0.8], stopping)
    assert (result.status, result.steps) == ("stopped", 8)
    assert result.reason == (
        "early stopping: validation/loss has not improved for 2 evaluations; the best was 0.9 at step 4"
    )
    assert (stopping.best.value, stopping.best.step) == (0.9, 4)
    assert (result.best_metric, result.best_step) == (0.9, 4)


GOING_ON = [0.0] * 20


@pytest.mark.parametrize(
    ("options", "values", "steps", "reason"),
    [
        ({"patience": 2, "min_delta": 0.1}, [1.0, 0.95, 0.91], 6, "not improved for 2 evaluations; the best was 1 at"),
        ({"patience": 2, "min_delta": 0.1}, [1.0, 0.95, 0.89, 0.8, 0.8], 10, "the best was 0.89 at step 6"),
        ({"patience": 1, "mode": "max"}, [-5.0, -6.0], 4, "not improved for 1 evaluation; the best was -5 at step 2"),
        ({"patience": 2, "mode": "max"}, [NAN, 0.1, 0.2, 0.2, 0.1], 10, "the best was 0.2 at step 6"),
        ({"patience": 2}, [1.0, NAN, NAN], 6, "the best was 1 at step 2"),
        ({"patience": 3}, [NAN, INF, -INF], 6, "not improved for 3 evaluations; no value was finite"),
        ({"patience": 2, "warmup": 3}, [9.0, 0.1, 9.0, 5.0, 6.0, 7.0], 12, "the best was 5 at step 8"),
        ({"patience": None, "target": 0.5}, [1.0, NAN, -INF, 0.6, 0.5], 10, "is 0.5; the target was 0.5"),
        ({"target": 0.9, "mode": "max"}, [0.1, 0.2, 0.95], 6, "is 0.95; the target was 0.9"),
        ({"divergence": 5.0}, [1.0, 5.0, 5.1], 6, "diverged: it is 5.1; the limit was 5"),
        ({"divergence": 5.0}, [1.0, NAN], 4, "diverged: it is nan"),
        ({"divergence": 0.0, "mode": "max"}, [1.0, -0.5], 4, "diverged: it is -0.5"),
    ],
)
def test_when_and_why_it_stops(options: Any, values: list[float], steps: int, reason: str) -> None:
    result = _fit(values + GOING_ON, EarlyStopping(**options))
    assert (result.status, result.steps) == ("stopped", steps)
    assert reason in result.reason


def test_a_gain_starts_the_count_again_and_a_run_that_gains_is_completed() -> None:
    result = _fit([5.0, 5.0, 4.0, 4.0, 3.0, 3.0, 2.0, 2.0, 1.0, 1.0], EarlyStopping(patience=2))
    assert (result.status, result.steps) == ("completed", 20)


def test_the_count_goes_on_after_a_resume_and_a_stopped_run_stays_stopped(tmp_path: Path) -> None:
    values = [1.0, 2.0, 3.0, 4.0, 5.0, 0.1]

    def fit(patience: int, *more: Any) -> FitResult:
        callbacks = [EarlyStopping(patience=patience), *more]
        return Scripted(_config(), values=values, callbacks=callbacks, run_dir=tmp_path).fit()

    assert fit(3, StopAt(5)).status == "interrupted"
    stopped = fit(3)
    assert (stopped.status, stopped.steps) == ("stopped", 8)
    again = fit(3)
    assert (again.status, again.reason, again.steps) == ("stopped", stopped.reason, 8)
    assert again.last_checkpoint == stopped.last_checkpoint
    longer = fit(4)
    assert (longer.status, longer.steps) == ("stopped", 10)


def test_evaluations_by_hand_are_not_judged() -> None:
    stopping = EarlyStopping(patience=1)
    trainer = Scripted(_config(), values=[1.0, 2.0], callbacks=[stopping])
    for _ in range(3):
        trainer.evaluate()
    assert (stopping.best.value, stopping.without_gain) == (None, 0)


def test_what_training_gives_is_judged_at_every_record(tmp_path: Path) -> None:
    config = _config(log_every="3 steps", learning_rate=0.0, shuffle=False)
    stopping = EarlyStopping("train/loss", patience=None, target=100.0)
    result = TinyTrainer(config, world=ALONE, callbacks=[stopping]).fit()
    assert (result.status, result.steps) == ("stopped", 4)  # the record after step 3 says so, step 4 ends with it
    assert "train/loss is" in result.reason


@pytest.mark.parametrize(
    ("monitor", "message"),
    [
        (
            "validation/accuracy",
            r"monitors 'validation/accuracy', which is not logged; logged metrics: validation/loss",
        ),
        ("loss", r"which is not logged; logged metrics: .*train/loss"),
    ],
)
def test_a_metric_that_is_not_there_is_an_error_at_once_that_lists_what_is(monitor: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        _fit([1.0] * 20, EarlyStopping(monitor, mode="max"))
    assert caught.value.__notes__ == ["raised by EarlyStopping.on_log"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "auto"}, r'mode must be "min" \(lower is better\) or "max"'),
        ({"patience": 0}, "patience must be an integer >= 1"),
        ({"patience": None}, "never stops: set patience"),
        ({"min_delta": -1.0}, "min_delta must be a number >= 0"),
        ({"target": NAN}, "target must be a finite number"),
        ({"warmup": 1.5}, "warmup must be an integer >= 0"),
        ({"target": 2.0, "divergence": 1.0}, "target must be better than divergence in mode 'min', got 2.0 and 1.0"),
    ],
)
def test_arguments_are_checked(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EarlyStopping(**options)


class Order(Callback):
    """Records the hooks around a stop."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def on_evaluation_end(self, trainer: Any, metrics: Any) -> None:
        self.notes.append("evaluation")

    def on_stop_requested(self, trainer: Any, reason: str) -> None:
        self.notes.append(f"stop: {reason}")

    def on_checkpoint_saved(self, trainer: Any, checkpoint: Any) -> None:
        self.notes.append("save")

    def on_epoch_end(self, trainer: Any, metrics: Any) -> None:
        self.notes.append("epoch")

    def on_fit_end(self, trainer: Any, error: BaseException | None) -> None:
        self.notes.append("end")


def test_a_stop_saves_ends_the_epoch_and_the_run_in_this_order(tmp_path: Path) -> None:
    order = Order()
    result = Scripted(
        _config(), values=[1.0, 2.0], callbacks=[order, EarlyStopping(patience=1)], run_dir=tmp_path
    ).fit()
    assert order.notes == ["evaluation", "evaluation", f"stop: {result.reason}", "save", "epoch", "end"]


def _on_ranks(world: World) -> tuple[str, str, int, int]:
    epochs: list[int] = []
    callbacks = [EarlyStopping(patience=1), lambda trainer, epoch, metrics: epochs.append(epoch)]
    config = _config(global_batch_size=8, checkpoint=CheckpointConfig(every=None))
    result = Scripted(config, values=[1.0, 2.0, 3.0], world=world, callbacks=callbacks).fit()
    return result.status, result.reason, result.steps, len(epochs)


def test_all_ranks_stop_at_the_same_evaluation_and_end_their_epoch() -> None:
    first, second = run_on_ranks(_on_ranks, 2)
    assert first == second
    assert (first[0], first[2:]) == ("stopped", (4, 1))
