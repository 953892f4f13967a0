"""In exact mode 1, 2, 3 and 4 ranks give the same bits, and unsupported settings are rejected with the reason."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from headway.datasets.stream import ParquetStream
from headway.trainer import (
    Callback,
    CheckpointConfig,
    ConfigError,
    ParallelConfig,
    ResumeError,
    StepError,
    World,
)
from tests.distributed import run_on_ranks
from tests.tiny import Losses, Rows, StopAt, TinyConfig, TinyTrainer, weights

ALONE = World.single("cpu")


class Uneven(TinyTrainer):
    """Row weights 0.1 to 0.9, which floats cannot represent; logs a metric and draws random numbers in the step."""

    def loss_weight(self, batch: Any) -> torch.Tensor:
        return (batch["id"] % 9 + 1).double().sum() / 10

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        self.log("drawn", torch.rand(()) * batch_idx)
        self.log("total", torch.rand(()), reduce="sum")
        self.log("most", torch.rand(()), reduce="max")
        assert torch.get_num_threads() == 1
        return outputs

    def configure_dataloaders(self) -> Any:
        train, _ = super().configure_dataloaders()
        return train, DataLoader(Rows(23, noise=0.1), batch_size=2)


class SomeParameters(Uneven):
    """Two optimizers, and a parameter that only some micro-batches use."""

    def configure_models(self) -> None:
        super().configure_models()
        self.rare = nn.Linear(6, 3)
        self.never = nn.Linear(2, 2)

    def configure_optimizers(self) -> None:
        super().configure_optimizers()
        rare = [*self.rare.parameters(), *self.never.parameters()]
        self.other = torch.optim.SGD(rare, lr=0.1, momentum=0.9, weight_decay=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        if batch["id"][0] % 3 == 0:
            outputs["loss"] = outputs["loss"] + self.rare(batch["x"]).square().mean()
        return outputs


class Overflows(Uneven):
    """Its first gradients, times the initial loss scale, overflow float16."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        return {**outputs, "loss": outputs["loss"] * 30}


class Streamed(Uneven):
    """Reads Parquet files."""

    folder = ""

    def configure_dataloaders(self) -> Any:
        path = str(Path(str(self.run_dir)).parent / "rows")
        options: Any = {"engine": "threads", "shards": 8}
        return ParquetStream(path, tail="keep", **options), ParquetStream(path, **options)


class DrawsBetween(Callback):
    """Draws random numbers between updates, like a callback that samples."""

    def __init__(self) -> None:
        self.drawn: list[float] = []

    def on_step_start(self, trainer: Any) -> None:
        self.drawn.append(float(torch.rand(())))

    def on_step_end(self, trainer: Any) -> None:
        self.drawn.append(float(torch.rand(())))
        trainer.log("drawn_between", self.drawn[-1])
        assert not trainer.config.exact or torch.get_num_threads() == 1


def _config(**changes: Any) -> TinyConfig:
    """Seven updates in an epoch, the last of 7 rows; the parts of most are 8, of up to 2 rows, and two more updates."""
    settings = {
        "max_steps": 9,
        "global_batch_size": 16,
        "micro_batch_size": 2,
        "drop_last": False,
        "dropout": 0.3,
        "noise": 0.1,
        "max_grad_norm": 0.5,
        "grad_norm_groups": ("model.blocks.*",),
        "log_every": "3 steps",
        "evaluate_every": "5 steps",
        "checkpoint": CheckpointConfig(every=None),
        "exact": True,
        **changes,
    }
    return TinyConfig(**settings)


def _fit(
    world: World, kind: type[TinyTrainer], config: TinyConfig, run_dir: str | None = None, stop_at: int | None = None
) -> dict[str, Any]:
    losses, draws = Losses(), DrawsBetween()
    callbacks = [losses, draws, *([] if stop_at is None else [StopAt(stop_at)])]
    told: list[str] = []
    trainer = kind(config, run_dir=run_dir, world=world, callbacks=callbacks, printer=told.append)
    trainer.fit()
    clocks = ("elapsed_s", "samples_per_s", "step_s", "data_wait", "data_wait_rank", "paused_s", "exact_s")
    return {
        "weights": weights(trainer),
        "moments": {
            f"{name}/{number}/{key}": value
            for name, optimizer in trainer.optimizers.items()
            for number, state in optimizer.state_dict()["state"].items()
            for key, value in state.items()
        },
        "records": {
            step: {name: value for name, value in record.items() if name not in clocks}
            for step, record in losses.records.items()
        },
        "drawn": draws.drawn,
        "micro_batches": trainer.micro_batches_seen,
        "seen": trainer.seen,
        "told": told,
        "timed": all("exact_s" in record for record in losses.records.values() if "train/loss" in record),
    }


def _differences(results: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    """Return the names of the values whose bits differ."""
    found = []
    for kind in ("weights", "moments"):
        assert results[kind].keys() == reference[kind].keys()
        found += [name for name, value in reference[kind].items() if not torch.equal(results[kind][name], value)]
    for step, record in results["records"].items():
        assert record.keys() == reference["records"][step].keys()
        found += [f"{name}@{step}" for name, value in record.items() if value != reference["records"][step][name]]
    return found


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 103 rows in two Parquet files with several row groups, where `Streamed` reads them."""
    folder = tmp_path_factory.mktemp("exact")
    (folder / "rows").mkdir()
    data = Rows(103)
    for name, part in (("a", slice(0, 60)), ("b", slice(60, 103))):
        x = pa.FixedSizeListArray.from_arrays(pa.array(data.x[part].reshape(-1).numpy()), 6)
        table = pa.table({"id": pa.array(range(103)[part]), "x": x, "y": data.y[part].numpy()})
        pq.write_table(table, folder / "rows" / f"{name}.parquet", row_group_size=16)
    return folder


CASES: dict[str, tuple[type[TinyTrainer], dict[str, Any]]] = {
    "loader": (Uneven, {}),
    "pieces": (Streamed, {"micro_batch_size": 1, "precision": "bf16"}),
    "some parameters": (SomeParameters, {"parallel": ParallelConfig(find_unused_parameters=True)}),
    "float16": (Overflows, {"precision": "fp16"}),
    # Not exact, and without randomness: the least that may differ.
    "usual mode": (Streamed, {"exact": False, "dropout": 0.0, "noise": 0.0}),
}


def _fit_all(world: World, folder: str, goes_on: int | None, begins: bool) -> dict[str, dict[str, Any]]:
    """Run all cases on one number of ranks, in one group of processes."""
    warnings.filterwarnings("ignore", "never.weight")
    results = {
        case: _fit(world, kind, _config(**changes), f"{folder}/{case} {world.size}")
        for case, (kind, changes) in CASES.items()
        if world.size <= 2 or case != "usual mode"
    }
    if goes_on is not None:
        results["gone on"] = _fit(world, Uneven, _config(), f"{folder}/begun {goes_on}")
    if begins:
        # Between two flushes of the log, mid-epoch.
        _fit(world, Uneven, _config(), f"{folder}/begun {world.size}", stop_at=4)
    if world.size == 3:
        results["wide"] = _fit(world, TinyTrainer, _config(max_steps=1, width=1000))
        with pytest.raises(ConfigError, match="3 ranks cannot divide the 2 logical shards of a global batch"):
            TinyTrainer(_config(micro_batch_size=8), world=world).fit()
    return results


Results = Callable[[int], list[dict[str, dict[str, Any]]]]


@pytest.fixture(scope="module")
def results(rows: Path) -> Results:
    """Return all results by number of ranks, rank by rank; runs resume from 1 on 4 ranks, and from 2 on 3."""
    folder = str(rows)

    @cache
    def at(world_size: int) -> list[dict[str, dict[str, Any]]]:
        if world_size == 1:
            return [_fit_all(ALONE, folder, None, begins=True)]
        goes_on = {3: 2, 4: 1}.get(world_size)
        at(goes_on or 1)
        return run_on_ranks(_fit_all, world_size, folder, goes_on, world_size < 4)

    return at


@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.extended)])
@pytest.mark.parametrize("case", ["loader", "pieces", "some parameters", "float16"])
def test_the_number_of_ranks_does_not_show_in_any_bit(results: Results, case: str, world_size: int) -> None:
    """Compares weights, moments, logs and random numbers between updates, over a tail and several evaluations."""
    reference = results(1)[0][case]
    # Skipped updates are not counted, so an epoch ends at an earlier step.
    assert sorted(reference["records"]) == ([3, 5, 6, 9] if case == "float16" else [3, 5, 6, 7, 9])
    assert ("skipped_steps" in reference["records"][9]) == (case == "float16")
    for rank in results(world_size):
        assert _differences(rank[case], reference) == []
        assert rank[case]["drawn"] == reference["drawn"]
        assert rank[case]["micro_batches"] == reference["micro_batches"]
        assert rank[case]["timed"]


def test_without_it_the_bits_differ(results: Results) -> None:
    assert len(_differences(results(2)[0]["usual mode"], results(1)[0]["usual mode"])) > 10


def test_a_run_resumes_on_fewer_ranks(results: Results, rows: Path) -> None:
    results(3)  # starts the run
    _assert_resumed(_fit(ALONE, Uneven, _config(), str(rows / "begun 3")), results)


@pytest.mark.parametrize("world_size", [3, pytest.param(4, marks=pytest.mark.extended)])
def test_a_run_resumes_on_more_ranks(results: Results, world_size: int) -> None:
    for rank in results(world_size):
        _assert_resumed(rank["gone on"], results)


def _assert_resumed(result: dict[str, Any], results: Results) -> None:
    reference = results(1)[0]["loader"]
    assert _differences(result, reference) == []
    assert 8 <= len(result["drawn"]) <= 10
    assert result["drawn"] == reference["drawn"][-len(result["drawn"]) :]


def test_the_cost_is_told(results: Results) -> None:
    # 2,012,003 numbers; a rank of three gives two thirds of each of up to two nodes, and of the sum.
    assert results(3)[0]["wide"]["told"][0] == (
        "exact: 8 logical shards per update, each with a separate gradient; a rank sends up to 16.1 MB per update "
        "(DDP: 10.7 MB)"
    )


def test_threads_of_the_process_do_not_matter() -> None:
    reference = _fit(ALONE, Uneven, _config(max_steps=4, width=257))
    torch.set_num_threads(2)
    try:
        assert _differences(_fit(ALONE, Uneven, _config(max_steps=4, width=257)), reference) == []
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_switching_it_is_a_change_that_is_named(tmp_path: Path) -> None:
    _fit(ALONE, Uneven, _config(exact=False), str(tmp_path), 4)
    with pytest.raises(ResumeError, match="config.exact: False -> True"):
        _fit(ALONE, Uneven, _config(), str(tmp_path))
    trainer = Uneven(_config(), run_dir=str(tmp_path), world=ALONE, printer=lambda text: None)
    assert trainer.fit(accept_changes=True).steps == 9
    with pytest.raises(ResumeError, match="config.exact: True -> False"):
        _fit(ALONE, Uneven, _config(exact=False, max_steps=12), str(tmp_path))


def test_another_cut_is_a_change_that_is_named(tmp_path: Path) -> None:
    """Without exact mode a run may resume with other micro-batches: only the last bits of the result differ."""
    _fit(ALONE, Uneven, _config(), str(tmp_path), 4)
    with pytest.raises(ResumeError, match="config.micro_batch_size: 2 -> 4"):
        _fit(ALONE, Uneven, _config(micro_batch_size=4), str(tmp_path))


# ---- What it rejects -----------------------------------------------------------------------------------------------


class Normed(TinyTrainer):
    def configure_models(self) -> None:
        super().configure_models()
        self.model.blocks.append(nn.BatchNorm1d(9))


class Compiled(TinyTrainer):
    def configure_models(self) -> None:
        super().configure_models()
        self.model.blocks[0].compile()


class Sparse(TinyTrainer):
    def configure_models(self) -> None:
        super().configure_models()
        self.table = nn.Embedding(3, 3, sparse=True)


class AnyIterable(TinyTrainer):
    def configure_dataloaders(self) -> Any:
        return [torch.zeros(8, 6)] * 4


class Measured(TinyTrainer):
    def configure_metrics(self) -> Any:
        return {"f1": lambda scores: 0.0}


REFUSED: dict[str, tuple[type[TinyTrainer], dict[str, Any], str]] = {
    "fsdp": (TinyTrainer, {"parallel": ParallelConfig(strategy="fsdp")}, "strategy 'fsdp' adds gradients in"),
    "hsdp": (TinyTrainer, {"parallel": ParallelConfig(strategy="hsdp", dp_shard=2)}, "strategy 'hsdp' adds"),
    "compile": (TinyTrainer, {"parallel": ParallelConfig(compile=True)}, "a compiled model uses kernels"),
    "no batch size": (TinyTrainer, {"global_batch_size": None}, "set global_batch_size"),
    "batch norm": (Normed, {}, "model.blocks.2, a BatchNorm1d, keeps running statistics"),
    "compiled by hand": (Compiled, {}, "model.blocks.0 is compiled"),
    "sparse": (Sparse, {}, "table has sparse gradients"),
    "iterable": (AnyIterable, {}, "IterableStream with the guarantee 'epoch', has no logical shards"),
    "metrics": (Measured, {}, "the metrics of configure_metrics"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_cannot_be_kept_is_refused_before_training(case: str) -> None:
    kind, changes, reason = REFUSED[case]
    if case == "iterable":
        # With an iterable, the stream rejects a global batch size alone.
        changes = {"global_batch_size": 16}
        reason = "needs data that can be cut to size"
    trainer = kind(_config(**changes), world=ALONE, printer=lambda text: None)
    with pytest.raises(ConfigError, match=reason):
        trainer.fit()
    assert trainer.seen == []


class StepsItself(TinyTrainer):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.backward(F.cross_entropy(self.model(batch["x"]), batch["y"]))
        self.step(self.optimizer)


class Counts(TinyTrainer):
    def configure_models(self) -> None:
        super().configure_models()
        self.model.register_buffer("count", torch.zeros(()))

    def init_weights(self) -> None:
        super().init_weights()
        self.model.count.zero_()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.model.count += 1
        return super().training_step(batch, batch_idx)


class Forgets(TinyTrainer):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model.first(batch["x"]).square().mean()


class OwnBatches(TinyTrainer):
    def loop(self) -> None:
        self.train_step({"id": torch.zeros(2), "x": torch.zeros(2, 6), "y": torch.zeros(2).long()})


@pytest.mark.parametrize(
    ("kind", "error", "reason"),
    [
        (StepsItself, StepError, "an optimizer can only step after the gradients of all parts"),
        (Counts, StepError, "training_step changed model.count"),
        (Forgets, StepError, "parameters got no gradient in a micro-batch"),
        (OwnBatches, ConfigError, "call train_epoch"),
    ],
)
def test_what_only_a_step_shows_is_refused_in_the_first_update(
    kind: type[TinyTrainer], error: type[Exception], reason: str
) -> None:
    trainer = kind(_config(), world=ALONE, printer=lambda text: None)
    with pytest.raises(error, match=reason):
        trainer.fit()
    assert trainer.global_step == 0


def test_a_step_may_call_backward_itself_and_a_frozen_norm_may_stay() -> None:
    class Backward(Normed):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            outputs = super().training_step(batch, batch_idx)
            self.backward(outputs["loss"])
            return outputs

    config = _config(freeze=("model.blocks.2.*",))
    by_itself = Backward(config, world=ALONE, printer=lambda text: None)
    by_us = Normed(config, world=ALONE, printer=lambda text: None)
    assert by_itself.fit().steps == by_us.fit().steps == 9
    for name, value in weights(by_us).items():
        assert torch.equal(weights(by_itself)[name], value)


def test_it_learns_what_the_usual_mode_learns() -> None:
    """The gradient is the same up to rounding; nothing in it is random."""
    config = _config(dropout=0.0, noise=0.0)
    exact = _fit(ALONE, TinyTrainer, config)
    usual = _fit(ALONE, TinyTrainer, dataclasses.replace(config, exact=False))
    for name, value in usual["weights"].items():
        torch.testing.assert_close(exact["weights"][name], value, atol=1e-5, rtol=1e-5)
