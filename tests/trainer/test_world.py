"""The world: alone, every collective is the identity; together, every rank gets the same answer."""

from typing import Any

import pytest
import torch

from headway.trainer.errors import ConfigError
from headway.trainer.world import World
from tests.distributed import run_on_ranks


def test_alone_every_collective_is_the_identity() -> None:
    world = World.alone("cpu")
    assert world.is_main
    assert world.sum(torch.tensor([2.0])).item() == 2.0
    assert world.gather("a") == ["a"]
    assert world.broadcast("a") == "a"
    assert world.any(True)
    assert not world.any(False)
    assert world.start_maximum(torch.zeros(1)) is None
    world.barrier()
    world.close()


def _collectives(world: World) -> dict[str, Any]:
    return {
        "sum": world.sum(torch.tensor(float(world.rank + 1))).item(),
        "gather": world.gather(f"rank {world.rank}"),
        "broadcast": world.broadcast({"from": world.rank}),
        "any": world.any(world.rank == 1),
        "none": world.any(False),
        "sum_of": world.sum_of(world.rank, 2),
    }


def test_every_rank_gets_the_same_answer() -> None:
    answers = run_on_ranks(_collectives, 2)
    assert answers[0] == answers[1]
    assert answers[0] == {
        "sum": 3.0,
        "gather": ["rank 0", "rank 1"],
        "broadcast": {"from": 0},
        "any": True,
        "none": False,
        "sum_of": [1, 4],
    }


def _fails_on_rank_1(world: World) -> None:
    if world.rank == 1:
        raise RuntimeError("rank one is unwell")
    world.barrier()


def test_a_rank_that_raises_is_told_by_name() -> None:
    with pytest.raises(AssertionError, match="rank one is unwell"):
        run_on_ranks(_fails_on_rank_1, 2)


def test_half_a_torchrun_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="MASTER_ADDR and MASTER_PORT"):
        World.from_environment()
