"""A training step may return None as its loss: the micro-batch is skipped, on all ranks or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headway.trainer import CheckpointConfig, ConfigError, ParallelConfig, StepError, World
from tests.distributed import run_on_ranks
from tests.tiny import Losses, StopAt, TinyConfig, TinyTrainer, weights

ALONE = World.single("cpu")


class Picky(TinyTrainer):
    """Skips micro-batches 1 and 3, and 4 and 5, which are all of an update."""

    skipped: frozenset[int] = frozenset({1, 3, 4, 5})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        if self.training and batch_idx in self.skipped:
            return None if batch_idx == 1 else {"loss": None, "accuracy": 0.0}
        return outputs


class OnMainOnly(Picky):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super(Picky, self).training_step(batch, batch_idx)
        return outputs if self.world.is_main else None


def _config(**changes: Any) -> TinyConfig:
    return TinyConfig(
        **{
            "max_steps": 6,
            "num_rows": 64,
            "global_batch_size": 16,
            "micro_batch_size": 8,
            "max_skipped_losses": 3,
            "log_every": "1 steps",
            "checkpoint": CheckpointConfig(every=None),
            **changes,
        }
    )


def _fit(
    world: World,
    parallel: dict[str, Any],
    rows: int,
    run_dir: str | None = None,
    stop_at: int = 0,
    kind: type[Picky] = Picky,
) -> Any:
    losses = Losses()
    # The same rows for every number of ranks: micro-batches grow with it.
    config = _config(parallel=ParallelConfig(**parallel), micro_batch_size=rows)
    trainer = kind(config, world=world, run_dir=run_dir, callbacks=[losses, StopAt(stop_at)])
    trainer.fit()
    return weights(trainer), losses.of("skipped_losses"), losses.of("train/loss")


def _plain() -> dict[str, torch.Tensor]:
    """Train with gradients of the kept micro-batches only, as plain PyTorch does."""
    reference = TinyTrainer(_config(max_skipped_losses=0), world=ALONE)
    reference.setup()
    model, optimizer, scheduler = reference.model, reference.optimizer, reference.scheduler
    number = steps = epoch = 0
    while steps < 6:
        for batch in reference._engine.data.epoch(epoch):  # type: ignore[union-attr]
            kept = 0
            for micro_batch in batch.micro_batches:
                if number not in Picky.skipped:
                    loss = torch.nn.functional.cross_entropy(model(micro_batch["x"]), micro_batch["y"])
                    (loss / 2).backward()
                    kept += 1
                number += 1
            if kept and steps < 6:
                optimizer.step()
                scheduler.step()
                steps += 1
            optimizer.zero_grad()
        epoch += 1
    return weights(reference)


def test_a_micro_batch_without_loss_adds_nothing_and_is_counted() -> None:
    found, counts, losses = _fit(ALONE, {}, 8)
    for name, value in _plain().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)
    assert max(counts.values()) == 4
    assert len(losses) == 6


class SkipsUpdates(Picky):
    skipped = frozenset({2, 3, 6, 7})


def _fit_both(world: World, parallel: dict[str, Any]) -> Any:
    return _fit(world, parallel, 4), _fit(world, parallel, 4, kind=SkipsUpdates)


def test_ranks_skip_alike() -> None:
    alone, counts, _ = _fit(ALONE, {}, 8, kind=SkipsUpdates)
    ddp = run_on_ranks(_fit_both, 2, {"strategy": "ddp"})
    fsdp = run_on_ranks(_fit_both, 2, {"strategy": "fsdp"})
    assert max(counts.values()) == 4
    for some, updates in (*ddp, *fsdp):
        assert max(some[1].values()) == max(updates[1].values()) == 4
        for name, value in alone.items():
            torch.testing.assert_close(updates[0][name], value, rtol=0, atol=1e-5)
            # Ranks divide a batch otherwise than micro-batches do, so one process skips other rows.
            torch.testing.assert_close(some[0][name], ddp[0][0][0][name], rtol=0, atol=1e-5)


def test_the_count_goes_on_after_a_resume(tmp_path: Path) -> None:
    whole, counts, _ = _fit(ALONE, {}, 8)
    _fit(ALONE, {}, 8, str(tmp_path), 2)
    found, counts_after, _ = _fit(ALONE, {}, 8, str(tmp_path))
    assert counts_after.items() <= counts.items()
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def _error_of_one_rank(world: World) -> str:
    with pytest.raises(StepError) as raised:
        OnMainOnly(_config(), world=world).fit()
    return str(raised.value)


def test_a_loss_on_some_ranks_only_is_an_error_on_all() -> None:
    for error in run_on_ranks(_error_of_one_rank, 2):
        assert "returned no loss on 1 of 2 ranks: skip a micro-batch on all of them" in error


def test_too_many_in_a_row_are_an_error() -> None:
    with pytest.raises(StepError, match=r"no loss for 3 micro-batches in a row \(max_skipped_losses=2\)"):
        Picky(_config(max_skipped_losses=2), world=ALONE).fit()


def test_without_the_setting_a_missing_loss_is_an_error() -> None:
    with pytest.raises(StepError, match="returned nothing; it must return the loss"):
        Picky(_config(max_skipped_losses=0), world=ALONE).fit()


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel": ParallelConfig(strategy="hsdp", dp_shard=1)},
        {"parallel": ParallelConfig(strategy="fsdp", no_sync=True)},
        {"halve_on_out_of_memory": True},
    ],
)
def test_what_reduces_gradients_later_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="max_skipped_losses needs gradients that are reduced in every micro-batch"):
        _config(**changes)
