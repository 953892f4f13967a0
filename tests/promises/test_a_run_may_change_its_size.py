"""One epoch on 1, 3, 2, 4 and 1 ranks in turn equals the epoch of a single rank."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.trainer import Callback, CheckpointConfig, Duration, Trainer, World
from headway.trainer.checkpoints.rng import seed_everything
from headway.trainer.trackers.jsonl import read_records
from tests.distributed import run_on_ranks
from tests.on_ray import OnRay, OnRayConfig, write_rows
from tests.tiny import weights

ROWS, BATCH, SEED = 200, 16, 11
# Neither 16 nor the last batch of 8 divides by 3. Logging is every 4 updates: each leg ends inside an interval.
LEGS: tuple[tuple[int, int | None], ...] = ((1, 3), (3, 5), (2, 8), (4, 10), (1, None))


class Dies(Callback):
    """Requests a checkpoint after an update, and fails on every rank once it is saved."""

    def __init__(self, step: int) -> None:
        self._step = step
        self.saved = 0

    def on_step_end(self, trainer: Trainer[Any]) -> None:
        if trainer.global_step == self._step:
            trainer.request_save()

    def on_checkpoint_saved(self, trainer: Trainer[Any], checkpoint: Any) -> None:
        self.saved = checkpoint.step
        raise ConnectionError("the machine is gone")


def _leg(world: World, run_dir: str, data: str, attempt: int, save_at: int | None) -> dict[str, Any]:
    config = OnRayConfig(
        data=data, max_epochs=1, global_batch_size=BATCH, micro_batch_size=4, seed=SEED, evaluate_every=None,
        log_every=Duration(4, "steps"), checkpoint=CheckpointConfig(every=None),
    )  # fmt: skip
    dies = Dies(save_at or 1_000)
    trainer = OnRay(config, run_dir=run_dir, world=world, attempt=attempt, callbacks=[] if save_at is None else [dies])
    with contextlib.suppress(ConnectionError):
        trainer.fit()
    return {"saved": dies.saved, "weights": weights(trainer), "seed": torch.initial_seed()}


def _records(run_dir: Path) -> dict[int, dict[str, float]]:
    kept = ("train/loss", "grad_norm", "lr", "epoch")
    return {
        record["step"]: {name: record[name] for name in kept if name in record}
        for record in read_records(str(run_dir / "metrics.jsonl"))
    }


def _rows(run_dir: Path) -> dict[int, set[int]]:
    """Return the rows of each update over all ranks; repeated updates count as the last attempt made them."""
    seen: dict[int, dict[int, set[int]]] = {}
    for file in run_dir.glob("rows-*.jsonl"):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            seen.setdefault(record["step"], {}).setdefault(record["attempt"], set()).update(record["ids"])
    return {step: attempts[max(attempts)] for step, attempts in seen.items()}


def test_an_epoch_on_any_sequence_of_world_sizes_is_the_same_epoch(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data", ROWS)
    undisturbed = _leg(World.single("cpu"), str(tmp_path / "one"), data, 1, None)
    legs = []
    for attempt, (size, save_at) in enumerate(LEGS, 1):
        arguments = (str(tmp_path / "many"), data, attempt, save_at)
        legs.append([_leg(World.single("cpu"), *arguments)] if size == 1 else run_on_ranks(_leg, size, *arguments))

    saved = [leg[0]["saved"] for leg in legs[:-1]]
    assert all(step % 4 for step in saved), f"every checkpoint is inside an interval: {saved}"
    assert saved == sorted(saved)

    rows, expected = _rows(tmp_path / "many"), _rows(tmp_path / "one")
    assert rows == expected
    assert sorted(row for step in rows.values() for row in step) == list(range(ROWS))

    records, wanted = _records(tmp_path / "many"), _records(tmp_path / "one")
    assert records.keys() == wanted.keys()
    for step, record in wanted.items():
        assert records[step] == pytest.approx(record, abs=1e-5), f"the record of step {step} covers its whole interval"
    for name, value in undisturbed["weights"].items():
        torch.testing.assert_close(legs[-1][0]["weights"][name], value, atol=1e-5, rtol=1e-5)

    # A rank that joins draws new random numbers, not those of an earlier rank.
    for leg, rank, joined_after in ((legs[1], 2, saved[0]), (legs[3], 2, saved[2]), (legs[3], 3, saved[2])):
        seed_everything(SEED, rank=rank, step=joined_after)
        assert leg[rank]["seed"] == torch.initial_seed()
    assert len({legs[1][2]["seed"], legs[3][2]["seed"], legs[3][3]["seed"]}) == 3
