"""Seconds of each setup phase, on the trainer and in the events of the run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headway.trainer import CheckpointConfig, World
from tests.tiny import StopAt, TinyConfig, TinyTrainer

ALONE = World.single("cpu")
PHASES = [
    "configure", "parallelise", "initialise", "open_data", "optimizers", "restore", "first_batch", "first_update",
]  # fmt: skip


class Slow(TinyTrainer):
    """Is slow to create the model, the first batch and the first update."""

    def configure_models(self) -> None:
        time.sleep(0.11)
        super().configure_models()

    def configure_dataloaders(self) -> Any:
        loader = super().configure_dataloaders()[0]

        def batches() -> Iterator[Any]:
            time.sleep(0.12)
            yield from loader

        return batches

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.13 if batch_idx == 0 else 0.0)
        return super().training_step(batch, batch_idx)


def test_each_phase_is_timed_and_the_first_update_apart_from_its_data(tmp_path: Path) -> None:
    config = TinyConfig(max_steps=3, checkpoint=CheckpointConfig(every=None))
    trainer = Slow(config, world=ALONE, run_dir=tmp_path, callbacks=[StopAt(2)])
    trainer.fit()
    times = trainer.setup_times
    assert sorted(times) == sorted(PHASES)
    assert times["configure"] >= 0.11
    assert times["first_batch"] >= 0.12
    assert times["first_update"] >= 0.13
    assert sum(times.values()) < trainer.elapsed_s
