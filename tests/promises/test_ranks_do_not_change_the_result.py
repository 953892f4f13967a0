"""1, 2 and 3 ranks, DDP, FSDP2 and HSDP, one micro-batch or several: the same losses from the same global batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from headway.trainer import CheckpointConfig, ParallelConfig, World
from tests.distributed import run_on_ranks
from tests.tiny import Losses, StopAt, TinyConfig, TinyTrainer, weights


def _config(strategy: str = "ddp", **changes: Any) -> TinyConfig:
    parallel = ParallelConfig(strategy=strategy, dp_shard=2 if strategy == "hsdp" else None)  # type: ignore[arg-type]
    settings = {
        "max_epochs": 2,
        "global_batch_size": 16,
        "drop_last": False,
        "max_grad_norm": 0.5,
        "log_every": "1 steps",
        "evaluate_every": "1 epochs",
        "checkpoint": CheckpointConfig(every=None),
        **changes,
    }
    return TinyConfig(parallel=parallel, **settings)


def _fit(
    world: World,
    run_dir: str | None,
    config: TinyConfig,
    stop_at: int | None = None,
    kind: type[TinyTrainer] = TinyTrainer,
) -> dict[str, Any]:
    losses = Losses()
    callbacks = [losses] if stop_at is None else [losses, StopAt(stop_at)]
    trainer = kind(config, run_dir=run_dir, world=world, callbacks=callbacks)
    result = trainer.fit()
    names = ("train/loss", "train/accuracy", "grad_norm", "validation/loss", "validation/accuracy")
    return {
        "status": result.status,
        "curves": {name: losses.of(name) for name in names},
        "weights": weights(trainer),
        "seen": trainer.seen,
        "steps": trainer.global_step,
        "samples": trainer.progress.samples,
    }


def _fit_on_ranks(world: World, run_dir: str | None, config: TinyConfig, stop_at: int | None = None) -> dict[str, Any]:
    return _fit(world, run_dir, config, stop_at)


def _global_batches(ranks: list[dict[str, Any]]) -> dict[int, set[int]]:
    """Return the rows of each update as a set, in which rows repeated as padding do not matter."""
    batches: dict[int, set[int]] = {}
    for rank in ranks:
        for step, rows in rank["seen"]:
            batches.setdefault(step, set()).update(rows)
    return batches


def _assert_same(ranks: list[dict[str, Any]], reference: dict[str, Any], *, tolerance: float = 1e-5) -> None:
    assert _global_batches(ranks) == _global_batches([reference])
    for rank in ranks:
        assert rank["steps"] == reference["steps"] == 14
        assert rank["samples"] == reference["samples"] == 206
        for name, curve in reference["curves"].items():
            assert rank["curves"][name] == pytest.approx(curve, abs=tolerance), name
        for name, value in reference["weights"].items():
            torch.testing.assert_close(rank["weights"][name], value, atol=tolerance, rtol=tolerance)


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    """One process, one micro-batch."""
    return _fit(World.single("cpu"), None, _config(micro_batch_size=16))


@pytest.mark.parametrize("micro_batch_size", [3, 4, 8])
def test_micro_batches(reference: dict[str, Any], micro_batch_size: int) -> None:
    """103 rows in batches of 16 end in one of 7: unequal micro-batches, and an unequal last update."""
    _assert_same([_fit(World.single("cpu"), None, _config(micro_batch_size=micro_batch_size))], reference)


@pytest.mark.parametrize(
    ("strategy", "world_size", "micro_batch_size"),
    [
        pytest.param("ddp", 2, 4, marks=pytest.mark.extended),
        ("ddp", 3, 8),
        pytest.param("fsdp", 2, 8, marks=pytest.mark.extended),
        ("fsdp", 3, 4),
        ("hsdp", 4, 8),
    ],
)
def test_ranks_and_strategies(reference: dict[str, Any], strategy: str, world_size: int, micro_batch_size: int) -> None:
    """Neither 16 nor the last batch of 7 divides by 3 ranks: their weights differ, and the result does not."""
    ranks = run_on_ranks(_fit_on_ranks, world_size, None, _config(strategy, micro_batch_size=micro_batch_size))
    _assert_same(ranks, reference)


@pytest.mark.parametrize(
    "options",
    [
        {"activation_checkpointing": "full"},
        {"reshard_after_forward": False},
        {"activation_checkpointing": "selective", "cpu_offload": True},
        pytest.param({"compile": True, "activation_checkpointing": "full"}, marks=pytest.mark.extended),
    ],
    ids=str,
)
def test_options_for_memory_and_speed_do_not_change_the_result(
    reference: dict[str, Any], options: dict[str, Any]
) -> None:
    config = _config(micro_batch_size=8)
    config = TinyConfig(**{**vars(config), "parallel": ParallelConfig(strategy="fsdp", **options)})
    _assert_same(run_on_ranks(_fit_on_ranks, 2, None, config), reference)


class ShardsItself(TinyTrainer):
    """Wraps its model itself; Headway leaves it unchanged."""

    def configure_models(self) -> None:
        super().configure_models()
        mesh = init_device_mesh("cpu", (self.world.size,))
        fully_shard(self.model.blocks[1], mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def on_setup_end(self) -> None:
        sharded = [name for name, module in self.model.named_modules() if isinstance(module, FSDPModule)]
        assert sharded == ["", "blocks.1"]


def _fit_sharded_by_itself(world: World, config: TinyConfig) -> dict[str, Any]:
    return _fit(world, None, config, kind=ShardsItself)


def test_a_model_that_its_author_has_sharded_is_left_as_it_is(reference: dict[str, Any]) -> None:
    _assert_same(run_on_ranks(_fit_sharded_by_itself, 2, _config("ddp", micro_batch_size=4)), reference)


def test_bf16_computes_forward_only(reference: dict[str, Any]) -> None:
    result = _fit(World.single("cpu"), None, _config(precision="bf16"))
    assert {value.dtype for value in result["weights"].values()} == {torch.float32}
    exact = list(reference["curves"]["train/loss"].values())
    rounded = list(result["curves"]["train/loss"].values())
    assert rounded != exact
    assert rounded == pytest.approx(exact, abs=0.05)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("ddp", 2), ("fsdp", 2)),
        pytest.param(("fsdp", 2), ("ddp", 3), marks=pytest.mark.extended),
        (("fsdp", 3), ("ddp", 1)),
        pytest.param(("ddp", 1), ("fsdp", 3), marks=pytest.mark.extended),
    ],
    ids=str,
)
def test_resuming_at_other_ranks_and_strategies(
    reference: dict[str, Any], tmp_path: Path, first: tuple[str, int], second: tuple[str, int]
) -> None:
    """Interrupted mid-epoch and resumed on other ranks: each remaining row once, and the same losses."""
    legs = []
    for (strategy, world_size), stop_at in ((first, 4), (second, None)):
        config = _config(strategy, micro_batch_size=8)
        if world_size == 1:
            legs.append([_fit(World.single("cpu"), str(tmp_path), config, stop_at)])
        else:
            legs.append(run_on_ranks(_fit_on_ranks, world_size, str(tmp_path), config, stop_at))
    assert legs[0][0]["status"] == "interrupted"
    before, after = _global_batches(legs[0]), _global_batches(legs[1])
    assert not set(before) & set(after)
    assert {**before, **after} == _global_batches([reference])
    for name, curve in reference["curves"].items():
        resumed = legs[1][0]["curves"][name]
        assert {step: curve[step] for step in resumed if step in curve} == pytest.approx(resumed, abs=1e-5), name
    for name, value in reference["weights"].items():
        torch.testing.assert_close(legs[1][0]["weights"][name], value, atol=1e-5, rtol=1e-5)
