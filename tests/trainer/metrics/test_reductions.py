"""Logged sums, extremes and last values are right over micro-batches, ranks, epochs and a resume."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.trainer import Callback, CheckpointConfig, Duration, FitResult, StepError, read_history
from headway.trainer.distributed.world import World
from headway.trainer.metrics.means import MeanMetrics
from tests.distributed import run_on_ranks
from tests.tiny import StopAt, TinyConfig, TinyTrainer

ALONE = World.single("cpu")
REDUCES = ("mean", "sum", "max", "min", "last")


class Logs(TinyTrainer):
    """Logs the row ids of each micro-batch with every reduction, so that results are easy to predict."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ids = batch["id"].double()
        self.log("mean", ids.mean())
        self.log("sum", ids.sum(), reduce="sum")
        self.log("max", ids.max(), reduce="max")
        self.log("min", ids.min(), reduce="min")
        self.log("last", ids[-1], reduce="last")
        return super().training_step(batch, batch_idx)


def config_of(**options: Any) -> TinyConfig:
    defaults = {"num_rows": 40, "max_epochs": 2, "global_batch_size": 8, "micro_batch_size": 3, "shuffle": False}
    return TinyConfig(**{**defaults, "log_every": Duration(2, "steps"), **options})


def fit(world: World, run_dir: str | None = None, **options: Any) -> tuple[FitResult, list[dict[str, float]]]:
    records: list[dict[str, float]] = []

    class Watched(Logs):
        def on_log(self, metrics: Any) -> None:
            records.append({name: value for name, value in metrics.items() if name.split("/")[-1] in REDUCES})

    result = Watched(config_of(**options), world=world, run_dir=run_dir).fit()
    return result, [record for record in records if record]


def expected(rows: range) -> dict[str, float]:
    return {
        "train/mean": sum(rows) / len(rows), "train/sum": sum(rows), "train/max": rows[-1], "train/min": rows[0],
    }  # fmt: skip


def test_each_is_over_the_micro_batches_of_an_interval_and_of_an_epoch(tmp_path: Path) -> None:
    result, records = fit(ALONE, str(tmp_path / "run"))
    training = [record for record in records if "train/sum" in record]
    intervals = [(0, 16), (16, 32), (32, 40), (0, 8), (8, 24), (24, 40)]
    for record, rows in zip(training, (range(*each) for each in intervals), strict=True):
        assert {**expected(rows), "train/last": rows[-1]} == record
    # The validation step is the training step: ten rows, in a fixed order, once.
    validation, _ = (record for record in records if "validation/sum" in record)
    assert validation == {
        "validation/mean": 4.5, "validation/sum": 45, "validation/max": 9, "validation/min": 0, "validation/last": 9,
    }  # fmt: skip
    for epoch in result.history:
        assert {**epoch, **expected(range(40)), "train/last": 39} == epoch
    assert read_history(tmp_path / "run" / "metrics.jsonl") == result.history


class OfBatch(Callback):
    """Logs inside a micro-batch, and between two updates."""

    def on_batch_end(self, trainer: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.log("by_hook", outputs["returned"])

    def on_evaluation_batch_end(self, trainer: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.log("by_hook", outputs["returned"])

    def on_step_end(self, trainer: Any) -> None:
        trainer.log("updates", float(trainer.global_step))


class Tokens(TinyTrainer):
    """Weights each row by its index."""

    def loss_weight(self, batch: Any) -> torch.Tensor:
        return (batch["id"] + 1).sum()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        value = batch["id"].double().mean()
        self.log("logged", value)
        return {**super().training_step(batch, batch_idx), "returned": value}


@pytest.mark.parametrize("exact", [False, True])
def test_means_over_an_epoch_do_not_depend_on_the_intervals_of_the_log(exact: bool) -> None:
    rows = []
    for every in (1, 2, 5):
        config = config_of(max_epochs=1, exact=exact, log_every=Duration(every, "steps"))
        rows += Tokens(config, world=ALONE, callbacks=[OfBatch()]).fit().history
    for row in rows:
        assert row == pytest.approx(rows[0])
    assert rows[0]["train/updates"] == 3


@pytest.mark.parametrize("exact", [False, True])
def test_a_mean_counts_as_much_as_what_the_step_returns(exact: bool) -> None:
    config = config_of(max_epochs=1, exact=exact, log_every=Duration(5, "steps"))
    metrics = Tokens(config, world=ALONE, callbacks=[OfBatch()]).fit().metrics
    for role in ("train", "validation"):
        assert metrics[f"{role}/logged"] == metrics[f"{role}/by_hook"] == metrics[f"{role}/returned"]
    assert metrics["train/returned"] > 25, "far from the 19.5 of equal weights"
    assert metrics["train/updates"] == 3, "of five updates, between which no micro-batch is in hand"


def on_ranks(world: World) -> tuple[list[dict[str, float]], list[dict[str, float]], str]:
    result, records = fit(world, max_epochs=1)
    metrics = MeanMetrics()
    metrics.log("x", 1.0, 1.0, "sum" if world.rank else "max")
    with pytest.raises(StepError, match="'x' is logged as a sum and as a max") as raised:
        metrics.read(world)
    if world.rank == 1:
        metrics.log("late", 1.0, 1.0, "sum")
    else:
        metrics.add({"late": 1.0})
    with pytest.raises(StepError, match="'late' is logged as a sum and as a mean"):
        metrics.read(world)
    return records, list(result.history), str(raised.value)


def test_ranks_do_not_change_them_and_two_kinds_are_refused_on_all() -> None:
    """Three ranks share eight rows unequally; the only row of the last rank's second micro-batch may be padding."""
    ranks = run_on_ranks(on_ranks, 3)
    assert all(rank == ranks[0] for rank in ranks)
    records, history, _ = ranks[0]
    _, alone = fit(ALONE, max_epochs=1)

    def without_last(records: list[dict[str, float]]) -> list[dict[str, float]]:
        return [{name: value for name, value in each.items() if not name.endswith("last")} for each in records]

    assert without_last(records) == without_last(alone)
    assert {**history[0], **expected(range(40))} == history[0]
    # That of the first rank.
    assert records[0]["train/last"] == 9


def test_padding_counts_in_nothing() -> None:
    """Two rows for three ranks: one rank has only padding."""
    for records in run_on_ranks(pad, 3):
        assert [record["train/sum"] for record in records] == [2 * (0 + 1)]


def pad(world: World) -> list[dict[str, float]]:
    class Logs(TinyTrainer):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("sum", batch["id"].sum() * 2, reduce="sum")
            return super().training_step(batch, batch_idx)

        def on_log(self, metrics: Any) -> None:
            if "train/sum" in metrics:
                records.append(dict(metrics))

    records: list[dict[str, float]] = []
    config = TinyConfig(num_rows=2, global_batch_size=2, max_steps=1, shuffle=False, drop_last=False)
    Logs(config, world=world).fit()
    return records


def test_an_interval_goes_on_after_a_resume(tmp_path: Path) -> None:
    """Stopped inside an interval: the first record of the resumed run covers all of it."""
    whole, whole_records = fit(ALONE)
    first = Logs(
        config_of(checkpoint=CheckpointConfig(keep_last="all")),
        world=ALONE, run_dir=tmp_path / "run", callbacks=[StopAt(3)],
    )  # fmt: skip
    assert first.fit().steps == 3
    resumed, records = fit(ALONE, str(tmp_path / "run"), checkpoint=CheckpointConfig(keep_last="all"))
    assert resumed.resumed_from is not None
    assert records == whole_records[1:]
    assert resumed.history == whole.history


def test_one_name_has_one_kind_for_the_whole_run() -> None:
    metrics = MeanMetrics()
    metrics.log("x", 1.0, 1.0, "sum")
    assert metrics.read(ALONE) == {"x": 1.0}
    with pytest.raises(StepError, match="'x' is logged as a sum and as a max"):
        metrics.log("x", 1.0, 1.0, "max")
    resumed = MeanMetrics()
    resumed.load_state_dict(metrics.state_dict())
    resumed.add({"x": 1.0})
    with pytest.raises(StepError, match="'x' is logged as a sum and as a mean"):
        resumed.read(ALONE)


def test_what_makes_no_sense_is_refused() -> None:
    metrics = MeanMetrics()
    with pytest.raises(StepError, match="reduce must be mean, sum, max, min, last, got 'median'"):
        metrics.log("x", 1.0, 1.0, "median")  # type: ignore[arg-type]
    with pytest.raises(StepError, match="weight requires reduce='mean', got reduce='sum'"):
        metrics.log("x", 1.0, 2.0, "sum")
    with pytest.raises(StepError, match="a number or a tensor of one element"):
        metrics.log("x", torch.zeros(3), 1.0, "sum")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_numbers_and_tensors_mix_and_a_nan_is_seen(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    metrics = MeanMetrics()
    for value in (2, torch.tensor(3, device=device), torch.tensor([[0.5]]), torch.tensor(1.0, device=device)):
        for reduce in ("sum", "max", "min", "last"):
            metrics.log(reduce, value, 1.0, reduce)
            metrics.log(f"nan/{reduce}", float("nan") if value == 2 else value, 1.0, reduce)
    read = metrics.read(World.single(device))
    assert [read[reduce] for reduce in ("sum", "max", "min", "last")] == [6.5, 3.0, 0.5, 1.0]
    assert all(math.isnan(read[f"nan/{reduce}"]) for reduce in ("sum", "max", "min"))
    assert read["nan/last"] == 1.0


def test_what_is_kept_on_a_device_is_reduced_there_as_on_the_host() -> None:
    """Treats CPU tensors like a GPU's."""
    metrics = MeanMetrics()
    for value in (3.0, torch.tensor(5.0), torch.tensor(4, dtype=torch.bfloat16)):
        for reduce in ("sum", "max", "min", "last"):
            metrics.reduced._merge_value(reduce, reduce, value)
    assert metrics.read(ALONE) == {"sum": 12.0, "max": 5.0, "min": 3.0, "last": 4.0}
