"""Retention rules, and the best checkpoint: kept, never copied, and named in the result."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.trainer import (
    Callback,
    CheckpointConfig,
    CheckpointError,
    CheckpointStore,
    ConfigError,
    Trainer,
    World,
)
from headway.trainer.checkpoints.format.manifest import Checkpoint, CheckpointWarning
from headway.trainer.checkpoints.retention import Best, Retention
from headway.trainer.checkpoints.store import read_checkpoint
from headway.trainer.loop.progress import Duration
from tests.tiny import StopAt, TinyConfig, TinyTrainer

NAN, INF = math.nan, math.inf


class Scripted(TinyTrainer):
    """Evaluations return these values in order; a resumed run continues in the list."""

    def __init__(self, *args: Any, values: Sequence[float], metric: str = "loss", **kwargs: Any) -> None:
        super().__init__(*args, **{"world": World.single("cpu"), **kwargs})
        self.values, self.metric = values, metric

    def configure_dataloaders(self) -> Any:
        train, validation = super().configure_dataloaders()
        return train, [next(iter(validation))]

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {self.metric: self.values[self.progress.evaluations]}


def _config(*, steps: int, checkpoint: dict[str, Any], every: int = 1) -> TinyConfig:
    return TinyConfig(
        num_rows=400,
        max_steps=steps,
        evaluate_every=f"{every} steps",  # type: ignore[arg-type]
        checkpoint=CheckpointConfig(**{"every": None, "at_end": False, **checkpoint}),
    )


def _on_disk(run_dir: Path) -> list[int]:
    store = CheckpointStore(str(run_dir / "checkpoints"), world=World.single("cpu"))
    return [each.step for each in store.list()]


@pytest.mark.parametrize(
    ("mode", "values", "taken"),
    [
        ("min", [1.0, 0.9, 0.9, 0.95, 0.8], [1.0, 0.9, 0.8]),
        ("max", [-5.0, -7.0, -5.0, -1.0], [-5.0, -1.0]),
        ("min", [NAN, -INF, INF, 3.0, NAN, 2.0], [3.0, 2.0]),
        ("max", [INF, NAN, 0.0], [0.0]),
        ("max", [0.9, 0.9000000000000001, 0.9 + 1e-11], [0.9, 0.9 + 1e-11]),
        ("min", [0.9000000000000001, 0.9], [0.9000000000000001]),
    ],
)
def test_best_is_finite_earliest_and_of_its_mode(mode: Any, values: list[float], taken: list[float]) -> None:
    best = Best(mode)
    assert [value for step, value in enumerate(values) if best.update(value, step=step)] == taken
    assert (best.value, best.step) == (taken[-1], values.index(taken[-1]))
    again = Best(mode)
    again.load_state_dict(best.state_dict())
    assert again == best


def test_a_gain_must_beat_min_delta() -> None:
    best = Best("min", min_delta=0.1)
    assert [best.update(value, step=0) for value in (1.0, 0.95, 0.9, 0.89, 0.8)] == [True, False, False, True, False]
    best = Best("max", min_delta=0.1)
    assert [best.update(value, step=0) for value in (1.0, 1.05, 1.2)] == [True, False, True]


def _checkpoints(*losses: float | None) -> list[Checkpoint]:
    return [
        Checkpoint(
            path=f"step-{step}",
            step=step,
            epoch=0,
            metrics={} if loss is None else {"loss": loss},
            meta={},
            world_size=1,
            sequence=step,
            time_s=1e9 + 60.0 * step,
        )
        for step, loss in enumerate(losses)
    ]


@pytest.mark.parametrize(
    ("retention", "losses", "best", "deleted"),
    [
        (Retention(1, "loss"), [3.0, 1.0, 2.0], 1, [0]),
        (Retention(2, "loss"), [1.0, 1.0, 1.0, 1.0], 0, [1]),
        (Retention(1, "loss", "max"), [3.0, 1.0, 2.0], 0, [1]),
        (Retention(1, "loss"), [None, NAN, None], None, [0, 1]),
        (Retention(1, "loss"), [NAN, -INF, 5.0, 6.0], 2, [0, 1]),
        (Retention(1, None), [1.0, 2.0], None, [0]),
        (Retention("all", "loss"), [2.0, 1.0, 3.0], 1, []),
        (Retention(3, "loss"), [1.0], 0, []),
        (Retention(3, "loss"), [], None, []),
        (Retention(2, "loss", keep_every=Duration(5)), [9.0, 8.0, 1.0, *[7.0] * 9], 2, [0, 1, 3, 4, 6, 7, 8, 9]),
        (Retention(1, None, keep_every=Duration(2)), [None] * 6, None, [0, 1, 3]),
        (Retention(1, "loss", keep_best=2), [2.0, 1.0, NAN, 3.0, 1.5, 9.0], 1, [0, 2, 3]),
        (Retention(1, "loss", "max", keep_best=2), [2.0, 1.0, -INF, 3.0, 1.5, 0.0], 3, [1, 2, 4]),
        (Retention(1, "loss", keep_best=0), [1.0, 2.0], 0, [0]),
        # 1e9 s is 40 s into a minute and 20 of 30 minutes.
        (Retention(1, None, keep_every_time=Duration(180, "seconds")), [None] * 8, None, [1, 3, 4, 6]),
        (
            Retention(1, "loss", keep_every=Duration(4), keep_every_time=Duration(180, "seconds")),
            [None, None, None, 1.0, *[2.0] * 5],
            3,
            [1, 6, 7],
        ),
    ],
)
def test_what_is_kept_is_a_pure_function(
    retention: Retention, losses: list[float | None], best: int | None, deleted: list[int]
) -> None:
    there = _checkpoints(*losses)
    assert retention.best(there) == (None if best is None else there[best])
    assert [each.step for each in retention.to_delete(there)] == deleted


def test_the_best_evaluation_is_saved_and_stays(tmp_path: Path) -> None:
    config = _config(steps=8, checkpoint={"save_best": True, "every": "1 steps", "keep_last": 2})
    values = [3.0, NAN, 1.0, 2.0, 1.0, 4.0, 5.0, 6.0]
    result = Scripted(config, values=values, run_dir=tmp_path).fit()
    assert _on_disk(tmp_path) == [3, 7, 8]
    assert result.best_checkpoint is not None
    assert (read_checkpoint(result.best_checkpoint).step, result.best_step, result.best_metric) == (3, 3, 1.0)
    assert result.last_checkpoint is not None
    assert read_checkpoint(result.last_checkpoint).step == 8


def test_the_last_the_best_and_every_nth_stay(tmp_path: Path) -> None:
    checkpoint = {"every": "1 steps", "keep_last": 2, "keep_every": "5 steps", "save_best": True}
    Scripted(_config(steps=12, checkpoint=checkpoint), values=[3.0, 2.0, 1.0, *[4.0] * 9], run_dir=tmp_path).fit()
    assert _on_disk(tmp_path) == [3, 5, 10, 11, 12]


def test_save_best_saves_at_once_and_nothing_else(tmp_path: Path) -> None:
    config = _config(steps=6, checkpoint={"save_best": True, "mode": "max", "keep_last": "all"})
    result = Scripted(config, values=[1.0, 0.5, 2.0, 2.0, 3.0, NAN], run_dir=tmp_path).fit()
    assert _on_disk(tmp_path) == [1, 3, 5]
    assert (result.best_step, result.best_metric) == (5, 3.0)


def test_the_best_survives_a_resume_and_is_not_beaten_by_worse(tmp_path: Path) -> None:
    values = [3.0, 1.0, 2.0, 2.0, 1.5, 1.2]
    checkpoint = {"save_best": True, "every": "1 steps", "keep_last": 1}
    Scripted(_config(steps=3, checkpoint=checkpoint), values=values, run_dir=tmp_path).fit()
    result = Scripted(_config(steps=6, checkpoint=checkpoint), values=values, run_dir=tmp_path).fit()
    assert _on_disk(tmp_path) == [2, 3, 6]  # the run resumed from 3
    assert result.best_checkpoint is not None
    assert (read_checkpoint(result.best_checkpoint).step, result.best_step, result.best_metric) == (2, 2, 1.0)


def test_the_result_is_true_where_the_best_evaluation_was_not_saved(tmp_path: Path) -> None:
    """Saved after 2 and 4 updates; a checkpoint after 3 would have the metric of 2."""
    config = _config(steps=4, checkpoint={"every": "2 steps", "keep_last": "all"})
    result = Scripted(config, values=[0.5, 3.0, 1.0, 2.0], run_dir=tmp_path).fit()
    assert (result.best_step, result.best_metric) == (1, 0.5)
    assert result.best_checkpoint is not None
    assert read_checkpoint(result.best_checkpoint).step == 4
    without = Scripted(config, values=[0.5, 3.0, 1.0, 2.0]).fit()
    assert (without.best_step, without.best_metric, without.best_checkpoint) == (1, 0.5, None)


def test_a_checkpoint_does_not_borrow_the_metric_of_earlier_weights(tmp_path: Path) -> None:
    config = _config(steps=4, every=3, checkpoint={"every": "1 steps", "keep_last": "all"})
    Scripted(config, values=[1.0, 5.0], run_dir=tmp_path).fit()
    store = CheckpointStore(str(tmp_path / "checkpoints"), world=World.single("cpu"))
    assert [each.metrics.get("validation/loss") for each in store.list()] == [None, None, 1.0, None]


def test_the_last_checkpoint_knows_of_the_last_evaluation(tmp_path: Path) -> None:
    """A save is due after the last update, before the evaluation at the end."""
    config = _config(steps=4, every=3, checkpoint={"every": "2 steps", "at_end": True})
    result = Scripted(config, values=[5.0, 1.0], run_dir=tmp_path).fit()
    assert _on_disk(tmp_path) == [2, 4]
    assert result.best_checkpoint == result.last_checkpoint
    again = Scripted(config, values=[5.0, 1.0], run_dir=tmp_path).fit()
    assert (again.status, again.best_metric, again.best_step) == ("completed", 1.0, 4)


def test_never_a_finite_value_is_no_best(tmp_path: Path) -> None:
    config = _config(steps=3, checkpoint={"save_best": True, "every": "1 steps"})
    result = Scripted(config, values=[NAN, INF, NAN], run_dir=tmp_path).fit()
    assert (result.best_checkpoint, result.best_metric, result.best_step) == (None, None, None)
    assert _on_disk(tmp_path) == [2, 3]


def test_a_monitor_that_is_not_there_is_warned_of_once_and_all_is_saved(tmp_path: Path) -> None:
    checkpoint = {"monitor": "validation/f1", "mode": "max", "every": "1 steps", "save_best": True}
    config = _config(steps=4, checkpoint=checkpoint)
    trainer = Scripted(config, values=[1.0] * 4, run_dir=tmp_path)
    with pytest.warns(
        CheckpointWarning, match=r"monitor is 'validation/f1', but .* has only validation/loss: "
    ) as caught:
        result = trainer.fit()
    assert len([each for each in caught if "validation/f1" in str(each.message)]) == 1
    assert _on_disk(tmp_path) == [3, 4]
    assert (result.status, result.best_checkpoint, result.best_metric) == ("completed", None, None)


def test_a_rehearsal_finds_out_that_the_monitor_is_not_there(tmp_path: Path) -> None:
    """The initial state is evaluated before the first update, but does not count as best."""
    checkpoint = {"monitor": "validation/f1", "mode": "max", "save_best": True}
    config = replace(_config(steps=3, checkpoint=checkpoint, every=100), sanity_batches=1)
    with pytest.warns(CheckpointWarning, match=r"monitor is 'validation/f1', but the evaluation after step 0 has only"):
        Scripted(config, values=[1.0] * 2, run_dir=tmp_path, callbacks=[Ends()]).fit()
    there = replace(_config(steps=2, checkpoint={"save_best": True}), sanity_batches=1)
    result = Scripted(there, values=[0.5, 0.7], run_dir=tmp_path / "there").fit()
    assert (result.best_metric, result.best_step) == (0.5, 1)


class Ends(Callback):
    """Stops before the first evaluation."""

    def on_step_end(self, trainer: Trainer[Any]) -> None:
        trainer.request_stop("enough")


def test_a_default_monitor_that_is_not_there_is_no_matter(tmp_path: Path) -> None:
    config = _config(steps=2, checkpoint={"every": "1 steps"})
    result = Scripted(config, values=[1.0] * 2, metric="f1", run_dir=tmp_path).fit()
    assert result.best_checkpoint is None


def test_an_evaluation_after_the_save_of_its_update_is_saved_with_it(tmp_path: Path) -> None:
    """Stopped when an evaluation was due: the resumed run evaluates first, and that is the best."""
    checkpoint = {"save_best": True, "at_end": True}
    config = _config(steps=4, every=2, checkpoint=checkpoint)
    stopped = Scripted(config, values=[1.0, 2.0], run_dir=tmp_path, callbacks=[StopAt(2)]).fit()
    assert (stopped.best_checkpoint, _on_disk(tmp_path)) == (None, [2])
    result = Scripted(config, values=[1.0, 2.0], run_dir=tmp_path).fit()
    assert (result.best_step, result.best_metric, _on_disk(tmp_path)) == (2, 1.0, [2, 4])
    assert result.best_checkpoint is not None
    assert read_checkpoint(result.best_checkpoint).metrics["validation/loss"] == 1.0


def test_the_best_of_an_epoch_is_saved_with_its_history(tmp_path: Path) -> None:
    config = TinyConfig(
        num_rows=32, max_epochs=2, checkpoint=CheckpointConfig(every=None, at_end=False, save_best=True)
    )
    trainer = Scripted(config, values=[2.0, 1.0], run_dir=tmp_path)
    result = trainer.fit()
    resumed = Scripted(config, values=[2.0, 1.0], run_dir=tmp_path).fit()
    assert [row["epoch"] for row in resumed.history] == [1.0, 2.0]
    assert resumed.history == result.history
    assert (resumed.best_metric, resumed.best_step) == (result.best_metric, result.best_step) == (1.0, 8)


def test_state_that_is_no_plain_value_names_callback_and_key(tmp_path: Path) -> None:
    class Holds(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"seen": 3, "guards": [threading.Lock()]}

    trainer = TinyTrainer(
        _config(steps=1, checkpoint={"at_end": True}, every=100),
        world=World.single("cpu"),
        callbacks=[Callback(), Holds()],
        run_dir=tmp_path,
    )
    with pytest.raises(CheckpointError, match=r"part 'callbacks', key '.*Holds/0/guards/0' holds a _thread\.lock"):
        trainer.fit()
    assert _on_disk(tmp_path) == []


def test_save_best_without_validation_data_is_refused() -> None:
    class NoValidation(TinyTrainer):
        def configure_dataloaders(self) -> Any:
            return super().configure_dataloaders()[0]

    config = TinyConfig(max_steps=2, checkpoint=CheckpointConfig(save_best=True))
    with pytest.raises(ConfigError, match="save_best needs an evaluation"):
        NoValidation(config, world=World.single("cpu")).fit()


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"mode": "lowest"}, "mode must be one of min, max"), ({"monitor": "val_loss"}, 'such as "validation/loss"')],
)
def test_monitor_and_mode_are_checked(changes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CheckpointConfig(**changes)
