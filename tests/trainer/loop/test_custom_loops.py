"""Custom loops: the same services, counters and endings as the default loop; schedulers step when due."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

from headway.trainer import Callback, CheckpointConfig, ConfigError, World
from headway.trainer.trackers.jsonl import read_records
from tests.distributed import run_on_ranks
from tests.tiny import Losses, Rows, StopAt, TinyConfig, TinyTrainer

ALONE = World.single("cpu")


def _config(**changes: Any) -> TinyConfig:
    """Four updates in an epoch."""
    return TinyConfig(**{"num_rows": 32, "max_steps": 10, "evaluate_every": None, **changes})


class Alternates(TinyTrainer):
    """One epoch of the training data, then two batches of something else, and so on."""

    def loop(self) -> None:
        other = DataLoader(Rows(100), batch_size=5, sampler=range(90, 100))
        self.returned: list[dict[str, float]] = []
        while not self.should_stop:
            self.train_epoch()
            for batch in other:
                if not self.should_stop:
                    self.returned.append(self.train_step(batch))


def test_a_loop_of_ones_own_has_all_services(tmp_path: Path) -> None:
    losses = Losses()
    config = _config(
        max_steps=11, log_every="5 steps", evaluate_every="3 steps", checkpoint=CheckpointConfig(every="4 steps")
    )  # type: ignore[arg-type]
    trainer = Alternates(config, run_dir=tmp_path, world=ALONE, callbacks=[losses])
    result = trainer.fit()
    assert (result.status, result.reason, result.steps, result.epochs) == ("completed", "max_steps=11 reached", 11, 2)
    # The last record covers what was left at the end.
    assert list(losses.of("train/loss")) == [4, 5, 10, 11]
    assert list(losses.of("validation/loss")) == [3, 6, 9, 11]
    assert sorted(each.name for each in (tmp_path / "checkpoints").iterdir()) == ["step-00000008", "step-00000011"]
    assert [sorted(each)[-1:] for each in trainer.returned] == [["train/loss"], [], []]
    assert [rows for step, rows in trainer.seen if step in (4, 5)] == [[90, 91, 92, 93, 94], [95, 96, 97, 98, 99]]
    # What is none of the epoch's does not move the place in it: the second epoch is whole.
    assert sorted(row for step, rows in trainer.seen if 6 <= step < 10 for row in rows) == list(range(32))
    # Who finds nothing left to do logs nothing again.
    again = Losses()
    assert Alternates(config, run_dir=tmp_path, world=ALONE, callbacks=[again]).fit().steps == 11
    assert again.records == {}


def test_a_loop_of_ones_own_stops_and_goes_on(tmp_path: Path) -> None:
    first = Alternates(_config(), run_dir=tmp_path, world=ALONE, callbacks=[StopAt(5)])
    assert (first.fit().status, first.global_step) == ("interrupted", 5)
    second = Alternates(_config(), run_dir=tmp_path, world=ALONE)
    assert second.fit().steps == 10
    whole = [rows for step, rows in second.seen if 5 <= step < 9]
    assert sorted(row for rows in whole for row in rows) == list(range(32))


def test_a_loop_may_return_early() -> None:
    class Once(TinyTrainer):
        def loop(self) -> None:
            self.train_epoch()

    result = Once(_config(), world=ALONE).fit()
    assert (result.status, result.reason, result.steps) == ("completed", "loop() has returned", 4)
    assert result.metrics["validation/loss"] > 0


def _on_ranks(world: World) -> tuple[int, str, list[int]]:
    stops = [StopAt(5)] if world.rank == 1 else []
    trainer = Alternates(_config(global_batch_size=8), world=world, callbacks=stops)
    result = trainer.fit()
    return result.steps, result.status, [step for step, _ in trainer.seen]


def test_ranks_leave_a_loop_of_ones_own_together() -> None:
    one, two = run_on_ranks(_on_ranks, 2)
    assert one == two
    assert one[:2] == (6, "interrupted")


# ---- Schedulers ----------------------------------------------------------------------------------------------------


class Several(TinyTrainer):
    scheduler_interval = {"b": "epoch", "c": "evaluation"}  # noqa: RUF012
    scheduler_monitor = {"d": "validation/accuracy"}  # noqa: RUF012

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.a, self.b, self.c = (StepLR(self.optimizer, 1000) for _ in range(3))
        self.d = ReduceLROnPlateau(self.optimizer, mode="max")


def test_each_scheduler_moves_at_its_own_time() -> None:
    trainer = Several(_config(max_steps=12, evaluate_every="2 steps"), world=ALONE)
    trainer.fit()
    assert [each.last_epoch for each in (trainer.a, trainer.b, trainer.c, trainer.d)] == [12, 3, 6, 6]
    assert 0 <= trainer.d.best <= 1


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("scheduler_interval", {"z": "step"}, r"scheduler_interval must name schedulers \(a, b, c, d\), got z"),
        ("scheduler_monitor", {"z": "x"}, r"scheduler_monitor must name schedulers .*, got z"),
        ("scheduler_interval", "batch", "one of step, epoch, evaluation, got 'batch'"),
        ("scheduler_interval", {"a": "never"}, "got 'never'"),
    ],
)
def test_a_time_that_never_comes_is_refused(attribute: str, value: Any, message: str) -> None:
    trainer = Several(_config(), world=ALONE)
    setattr(trainer, attribute, value)
    with pytest.raises(ConfigError, match=message):
        trainer.fit()


def test_before_it_is_set_up_a_trainer_says_so() -> None:
    trainer = TinyTrainer(TinyConfig(max_epochs=2), world=World.single("cpu"))
    with pytest.raises(ConfigError, match="is not set up yet"):
        trainer.log("a", 1.0)
    with pytest.raises(ConfigError, match="is not set up yet"):
        _ = trainer.elapsed_s
    while not trainer.should_stop:
        trainer.train_epoch()
    assert trainer.current_epoch == 2


class LooksInside(TinyTrainer):
    """Looks at its models in the middle of an evaluation."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        with self.evaluating():
            assert not self.training
        assert (self.training, torch.is_grad_enabled(), self.model.training) == (False, False, False)
        return super().validation_step(batch, batch_idx)


def test_an_evaluation_inside_an_evaluation_ends_neither() -> None:
    trainer = LooksInside(TinyConfig(max_steps=1), world=World.single("cpu"))
    trainer.fit()
    assert (trainer.training, trainer.model.training) == (True, True)


class TensorRate(TinyTrainer):
    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=torch.tensor(0.1))
        self.scheduler = StepLR(self.optimizer, step_size=1, gamma=0.5)


def test_records_have_numbers_whatever_they_are_made_of(tmp_path: Path) -> None:
    """The learning rate that made the update, also where it is a tensor; and what metric sources return, as floats."""

    class AddMetrics(Callback):
        def on_setup_end(self, trainer: Any) -> None:
            trainer.add_metric_source(lambda record: {"np": np.float32(1.5), "torch": torch.tensor(2.5)})

    epochs: list[int] = []
    config = TinyConfig(max_steps=3, steps_per_epoch=2, log_every=1)  # type: ignore[arg-type]
    callbacks = [AddMetrics(), lambda trainer, epoch, metrics: epochs.append(epoch)]
    TensorRate(config, world=World.single("cpu"), run_dir=tmp_path, callbacks=callbacks).fit()
    records = [record for record in read_records(str(tmp_path / "metrics.jsonl")) if "lr" in record]
    assert [record["lr"] for record in records] == pytest.approx([0.1, 0.05, 0.025])
    assert [(record["np"], record["torch"]) for record in records] == [(1.5, 2.5)] * 3
    assert epochs == [1, 2], "an epoch that a limit cuts short has a number of its own"
