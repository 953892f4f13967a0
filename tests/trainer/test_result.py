"""Results: how a run ended and what it measured, told truly, in memory and from its files."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.trainer import Callback, CheckpointConfig, Table, Trainer, World, read_history
from headway.trainer.trackers import (
    CsvTracker,
    ImageFilesTracker,
    JsonlTracker,
    TensorBoardTracker,
    Tracker,
    read_records,
)
from tests.distributed import run_on_ranks
from tests.tiny import StopAt, TinyConfig, TinyTrainer


def trainer(tmp_path: Path | str, *callbacks: Callback, world: World | None = None, **changes: Any) -> TinyTrainer:
    trackers = changes.pop("trackers", None)
    config = TinyConfig(**{"num_rows": 40, "max_epochs": 3, "log_every": "2 steps", **changes})
    return TinyTrainer(
        config, run_dir=tmp_path, callbacks=callbacks, trackers=trackers, world=world or World.single("cpu")
    )


def test_history_is_rows_and_columns_and_is_found_again_in_the_files(tmp_path: Path) -> None:
    result = trainer(tmp_path).fit()
    assert (result.status, result.reason) == ("completed", "max_epochs=3 reached")
    assert [(row["epoch"], row["step"]) for row in result.history] == [(1, 5), (2, 10), (3, 15)]
    columns = result.history.columns()
    assert set(columns) >= {"epoch", "step", "train/loss", "train/accuracy", "validation/loss", "validation/accuracy"}
    assert columns["train/loss"] == [row["train/loss"] for row in result.history]
    assert columns["train/loss"][0] > columns["train/loss"][-1]
    assert read_history(tmp_path / "metrics.jsonl") == result.history
    # The mean of an epoch is that of its intervals, of 2, 2 and 1 updates.
    losses = [record["train/loss"] for record in read_records(tmp_path / "metrics.jsonl")][:3]
    assert columns["train/loss"][0] == pytest.approx((2 * losses[0] + 2 * losses[1] + losses[2]) / 5)
    assert read_history(tmp_path / "nothing.jsonl") == []


class Constant(TinyTrainer):
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {**super().training_step(batch, batch_idx), "constant": 0.9}


@pytest.mark.parametrize("exact", [False, True])
def test_a_constant_is_that_constant_in_every_record(tmp_path: Path, exact: bool) -> None:
    config = TinyConfig(num_rows=44, max_epochs=2, log_every="3 steps", exact=exact, global_batch_size=8)  # type: ignore[arg-type]
    result = Constant(config, run_dir=tmp_path, world=World.single("cpu")).fit()
    for name in ("train/constant", "validation/constant"):
        records = [record[name] for record in read_records(tmp_path / "metrics.jsonl") if name in record]
        assert set(records) == {0.9}
        assert len(records) >= 2
        assert result.history.columns()[name] == [0.9, 0.9]


def test_history_in_the_files_is_that_of_all_attempts(tmp_path: Path) -> None:
    stopped = trainer(tmp_path, StopAt(7)).fit()
    assert (stopped.status, stopped.reason, stopped.steps, stopped.epochs) == ("interrupted", "step 7", 7, 1)
    assert read_history(tmp_path / "metrics.jsonl") == stopped.history
    assert len(stopped.history) == 1
    resumed = trainer(tmp_path).fit()
    assert (resumed.status, resumed.resumed_from) == ("completed", stopped.last_checkpoint)
    assert read_history(tmp_path / "metrics.jsonl") == resumed.history
    assert resumed.history[0] == stopped.history[0]
    assert len(resumed.history) == 3


class LogImages(Callback):
    """Logs a hundred images after every update, and one inside it, on every rank."""

    def on_gradients_ready(self, trainer: Trainer[Any]) -> None:
        trainer.log_images({"inside/one": torch.rand(3, 2, 2)})

    def on_step_end(self, trainer: Trainer[Any]) -> None:
        trainer.log_images({f"image/{i}": torch.rand(3, 2, 2) for i in range(100)})


class NoImages(Tracker):
    def log_images(self, images: Any, *, step: int) -> None:
        raise OSError("no space left")


def log_images(world: World, folder: str) -> int:
    """Stops at update 3, which is saved, goes on to 5, which is not, and from 3 again; returns how often it warned."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for stop in (3, 5, 6):
            trackers = [JsonlTracker(), CsvTracker(), TensorBoardTracker(), ImageFilesTracker(limit=8), NoImages()]
            checkpoint = CheckpointConfig(every=None, at_end=stop == 3)
            trainer(
                folder, LogImages(), StopAt(stop), world=world, trackers=trackers, log_every=1, checkpoint=checkpoint
            ).fit()
    return sum("NoImages.log_images failed" in str(each.message) for each in caught)


@pytest.mark.slow
def test_images_of_the_main_rank_are_stored_up_to_the_limit_and_no_step_is_twice_in_any_tracker(
    tmp_path: Path,
) -> None:
    assert run_on_ranks(log_images, 2, str(tmp_path)) == [3, 0], "one warning in each of three lives, on the main rank"

    steps = [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in read_records(tmp_path / "metrics.jsonl")] == steps
    rows = (tmp_path / "metrics.csv").read_text().splitlines()[1:]
    assert [int(row.split(",")[0]) for row in rows] == steps
    images = sorted(path.relative_to(tmp_path / "images").as_posix() for path in tmp_path.glob("images/*/*/*"))
    names = [*(f"image/{i}" for i in range(7)), "inside/one"]
    assert images == [f"step-{step:08d}/{name}.png" for step in steps for name in names]

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"images": 0})
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == steps
    assert [event.step for event in events.Images("image/0")] == steps
    assert [event.step for event in events.Images("inside/one")] == steps


def test_table_is_lists_text_and_a_data_frame() -> None:
    table = Table([{"epoch": 1.0, "loss": 0.123456}, {"epoch": 2.0, "loss": math.nan, "name": "a"}])
    assert table.columns()["epoch"] == [1.0, 2.0]
    assert math.isnan(table.columns()["name"][0])
    assert table.text().splitlines() == ["epoch    loss  name", "    1  0.1235", "    2     nan     a"]
    assert Table().text() == ""
    frame = pytest.importorskip("pandas") and table.dataframe()
    assert list(frame.columns) == ["epoch", "loss", "name"]
    assert frame["epoch"].tolist() == [1.0, 2.0]
