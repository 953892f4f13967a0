"""An epoch delivers every sample exactly once, through interruptions and changes of the number of ranks."""

from __future__ import annotations

from typing import Any

import pytest

from headway.trainer import CheckpointConfig, World
from tests.distributed import run_on_ranks
from tests.tiny import StopAt, TinyConfig, TinyTrainer

Seen = list[tuple[int, list[int]]]


def _leg(world: World, run_dir: str, drop_last: bool, stop_at: int | None) -> tuple[Seen, int, int, float, Any]:
    config = TinyConfig(
        max_epochs=2,
        global_batch_size=8,
        drop_last=drop_last,
        evaluate_every=None,
        checkpoint=CheckpointConfig(every=None),
    )
    trainer = TinyTrainer(config, run_dir=run_dir, world=world, callbacks=[] if stop_at is None else [StopAt(stop_at)])
    result = trainer.fit()
    return (
        trainer.seen,
        result.steps,
        trainer.progress.samples,
        result.metrics.get("validation/loss", 0.0),
        result.history,
    )


@pytest.mark.parametrize(("drop_last", "steps"), [(False, 13), (True, 12)])
def test_103_rows_on_4_then_3_then_1_ranks(tmp_path: Any, drop_last: bool, steps: int) -> None:
    """An epoch has 13 updates with the tail kept, 12 with it dropped; no rank deadlocks."""
    seen: dict[int, list[int]] = {}
    validation = []
    for world_size, stop_at in ((4, 4), (3, 8), (1, None)):
        if world_size == 1:
            ranks = [_leg(World.single("cpu"), str(tmp_path), drop_last, stop_at)]
        else:
            ranks = run_on_ranks(_leg, world_size, str(tmp_path), drop_last, stop_at)
        assert len({rank[1:3] for rank in ranks}) == 1, "all ranks agree on steps and samples"
        for rank in ranks:
            for step, rows in rank[0]:
                seen.setdefault(step, []).extend(rows)
        validation.append(ranks[0][3])
    assert ranks[0][1:3] == (2 * steps, 2 * (96 if drop_last else 103))
    for epoch in (0, 1):
        batches = [seen[step] for step in range(epoch * steps, (epoch + 1) * steps)]
        # Eight rows, or the tail of seven, which four ranks share, so that one of them repeats a row.
        assert [len(set(batch)) for batch in batches] == [8] * 12 + [7] * (not drop_last)
        rows = [row for batch in batches for row in set(batch)]
        assert len(rows) == len(set(rows)) == (96 if drop_last else 103)
    assert validation[-1] > 0
    assert [row.get("dropped_samples", 0) for row in ranks[0][4]] == [7 * drop_last] * 2
