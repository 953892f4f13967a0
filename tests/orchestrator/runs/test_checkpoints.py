"""The checkpoints of a run, read while the run continues."""

from __future__ import annotations

from pathlib import Path

from headway.orchestrator.runs.checkpoints import RunCheckpoints
from headway.trainer import World
from headway.trainer.checkpoints.store import CheckpointStore
from tests.trainer.checkpoints.test_store import damage, save


def test_one_that_is_replaced_while_it_is_verified_is_verified_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run" / "checkpoints", world=World.single("cpu"))
    save(store, 4, part="first")
    before = RunCheckpoints.of("run", str(tmp_path))
    last = save(store, 4, part="another one")
    assert before.problems(before.entries[0]) == []
    damage(last, "state.json", "truncate")
    assert before.problems(before.entries[0]) == ["state.json has 20 of 41 bytes"]
