"""The world: with one rank every collective is the identity; with several, all ranks get the same result."""

import datetime
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from headway.trainer import ConfigError, Duration, ParallelConfig, World
from headway.trainer.distributed import world as world_module
from headway.trainer.distributed.world import Rendezvous
from tests.distributed import run_on_ranks
from tests.tiny import TinyConfig, TinyTrainer


def test_alone_every_collective_is_the_identity() -> None:
    world = World.single("cpu")
    assert world.is_main
    assert world.all_reduce_sum(torch.tensor([2.0])).item() == 2.0
    assert world.all_gather_object("a") == ["a"]
    assert world.gather_object("a") == ["a"]
    assert world.broadcast("a") == "a"
    assert world.any(True)
    assert not world.any(False)
    assert world.all_reduce_max_async(torch.zeros(1)) is None
    world.barrier()
    world.close()


def _collectives(world: World) -> dict[str, Any]:
    return {
        "sum": world.all_reduce_sum(torch.tensor(float(world.rank + 1))).item(),
        "gather": world.all_gather_object(f"rank {world.rank}"),
        "broadcast": world.broadcast({"from": world.rank}),
        "any": world.any(world.rank == 1),
        "none": world.any(False),
        "sum_of": world.sum_ints(world.rank, 2),
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


def _gathered(world: World) -> list[int]:
    return world.gather_object(world.rank + 1)


def test_only_the_main_rank_gets_what_is_gathered() -> None:
    assert run_on_ranks(_gathered, 2) == [[1, 2], []]


class Late(TinyTrainer):
    """The main rank is slow in the first step, and as slow in the fourth."""

    def on_step_start(self) -> None:
        if self.world.is_main and self.global_step in (0, 3):
            time.sleep(1.5)


def _broadcast_dtypes(world: World) -> list[list[float]]:
    kinds = (torch.float8_e4m3fn, torch.int16, torch.uint32, torch.bool, torch.bfloat16, torch.complex64)
    tensors = [torch.full(shape, 1 - world.rank).to(kind) for kind in kinds for shape in ((), (2,), (0,))]
    one_by_one = [world.broadcast_tensor(each.clone()) for each in tensors]
    world.broadcast_tensors(tensors)
    return [each.flatten().to(torch.complex64).real.tolist() for each in [*one_by_one, *tensors]]


def test_tensors_of_every_dtype_are_broadcast() -> None:
    for found in run_on_ranks(_broadcast_dtypes, 2):
        assert found == [[1.0], [1.0, 1.0], []] * 12


def _broadcast_a_large_tensor(world: World) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a large tensor is copied")

    large = torch.full((world_module._BUCKET_BYTES // 4 + 1,), float(world.rank))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "cat", fail)
        world.broadcast_tensors([large])
    assert not large.any()


def test_a_large_tensor_is_broadcast_without_a_copy() -> None:
    run_on_ranks(_broadcast_a_large_tensor, 2)


def _waits_for_the_main_rank(world: World) -> tuple[int, str]:
    parallel = ParallelConfig(timeout=Duration(60, "seconds"), step_timeout=Duration(0.5, "seconds"))
    trainer = Late(TinyConfig(max_steps=5, parallel=parallel), world=world)
    with pytest.raises(RuntimeError) as raised:
        trainer.fit()
    # The ranks have lost each other, and the harness waits for them once more.
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return trainer.global_step, str(raised.value)


def test_a_rank_gives_up_on_others_sooner_after_the_first_step() -> None:
    """The first step, which may have to compile, has the longer timeout."""
    main, waiting = run_on_ranks(_waits_for_the_main_rank, 2)
    assert (main[0], waiting[0]) == (3, 3)
    assert "Timed out" in waiting[1]


def _keeps_its_time_apart(world: World) -> None:
    config = TinyConfig(max_steps=1, parallel=ParallelConfig(step_timeout=Duration(0.5, "seconds")))
    trainer = TinyTrainer(config, world=world)
    apart = world.with_own_group()
    trainer.fit()
    if world.is_main:
        time.sleep(1.2)  # as during a save
    apart.barrier()
    assert trainer._engine.loop._step_timeout is None
    trainer._engine.loop.rejoin_process_group(lambda: None)
    assert trainer._engine.loop._step_timeout == Duration(0.5, "seconds")


def test_a_group_apart_keeps_its_longer_time_and_a_new_one_gets_the_shorter_after_its_first_step() -> None:
    run_on_ranks(_keeps_its_time_apart, 2)


def _times_of_groups(world: World, folder: str) -> list[float]:
    before = set(distributed_c10d._world.pg_map)
    # Each replica is complete, so nothing is sharded: only the groups matter.
    parallel = ParallelConfig(strategy="hsdp", dp_shard=1, timeout=Duration(77, "seconds"))
    TinyTrainer(TinyConfig(max_steps=1, parallel=parallel), world=world, run_dir=folder).fit()
    World.from_environment(timeout_s=77.0)
    # Not on a CPU: a separate group serves calls that must not wait for the device.
    World.attach("meta", timeout_s=77.0)
    began = [group for group in distributed_c10d._world.pg_map if group not in before]
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in began]


def test_all_groups_that_are_begun_take_the_time_of_the_run(tmp_path: Path) -> None:
    for times in run_on_ranks(_times_of_groups, 2, str(tmp_path)):
        assert len(times) >= 3  # separate group, mesh, CPUs
        assert set(times) == {77.0}


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


def test_after_an_error_a_rank_with_nccl_does_not_wait_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without GPUs: the group must not be destroyed, which is what hangs."""
    ended: list[str] = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: ended.append("destroyed"))
    for device in ("cuda", "cpu"):
        world = World(rank=0, size=2, local_rank=0, device=torch.device(device), rendezvous=object())  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="the user's own"), world:
            raise RuntimeError("the user's own")
        assert ended == (["destroyed"] if device == "cpu" else [])
    world.close()
    assert ended == ["destroyed"] * 2


def test_a_device_that_is_asked_for_is_made_current(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert World.single("cuda:1").device == torch.device("cuda:1")
    World.single("cpu")
    assert current == [torch.device("cuda:1")]


def test_trainers_of_one_program_meet_at_different_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the second group would find the stale addresses of the first, and sometimes hang."""
    prefixes: list[str] = []
    monkeypatch.setattr(world_module, "PrefixStore", lambda prefix, store: prefixes.append(prefix))
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: None)
    for _ in range(2):
        group = Rendezvous(None, 0, 2, torch.device("cpu"), "gloo", datetime.timedelta(seconds=1))  # type: ignore[arg-type]
        group.start_process_group()
        group.start_process_group()
    assert len(set(prefixes)) == 4


def _means_in_buckets(world: World) -> tuple[list[int], list[list[float]]]:
    reduced: list[int] = []
    all_reduce = dist.all_reduce

    def records(tensor: torch.Tensor, **options: Any) -> Any:
        reduced.append(tensor.nbytes)
        return all_reduce(tensor, **options)

    tensors = [torch.full((size,), float(world.rank + i)) for i, size in enumerate((5, 6, 20, 1))]
    tensors.append(torch.full((3,), float(world.rank), dtype=torch.float64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world_module, "_BUCKET_BYTES", 44)
        patch.setattr(dist, "all_reduce", records)
        world.all_reduce_mean(tensors)
    return reduced, [tensor.unique().tolist() for tensor in tensors]


def test_means_need_memory_for_a_bucket_and_not_for_all_tensors() -> None:
    for reduced, means in run_on_ranks(_means_in_buckets, 2):
        assert reduced == [44, 80, 4, 24]
        assert means == [[0.5], [1.5], [2.5], [3.5], [0.5]]


def _attaches(world: World) -> tuple[bool, float]:
    first, second = World.attach("meta", timeout_s=5.0), World.attach("meta", timeout_s=77.0)
    assert first.control is not None
    backend: Any = first.control._get_backend(torch.device("cpu"))
    return first.control is second.control, backend.options._timeout.total_seconds()


def test_all_trainers_of_a_process_group_share_one_group_for_bookkeeping() -> None:
    assert run_on_ranks(_attaches, 2) == [(True, 77.0)] * 2
