"""A save that is killed leaves the previous checkpoint, never half of one. Real processes, real SIGKILL.

One process imports torch and forks the victims, so that twenty of them take seconds, not minutes.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from headway.trainer.checkpoints.store import CheckpointStore
from headway.trainer.distributed.world import World

REPOSITORY = Path(__file__).parents[2]


class Everywhere:
    """Return a state that contains the step everywhere: in tensors, also a sharded one, and in plain values."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        rows = torch.full((64, 1024), float(self.step))
        if self.world.size > 1:
            rows = distribute_tensor(rows, init_device_mesh("cpu", (self.world.size,)), [Shard(0)])
        return {"rows": rows, "layers": [torch.full((1000,), self.step) for _ in range(8)], "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rows = state["rows"].to_local() if isinstance(state["rows"], DTensor) else state["rows"]
        found = {value for tensor in (rows, *state["layers"]) for value in tensor.unique().tolist()}
        assert found == {state["step"]}, f"step {state['step']} holds {found}"
        self.step = state["step"]


class Alike:
    """A state that differs between ranks."""

    def __init__(self, shared: Everywhere) -> None:
        self.shared = shared
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.shared.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def restore(root: str, world: World) -> tuple[CheckpointStore, Everywhere, int]:
    """Resume as a run does; step -1 means that there is no checkpoint yet."""
    store = CheckpointStore(root, world=world, keep_last=2)
    store.remove_leftovers()
    checkpoint = store.newest_good()
    state = Everywhere(world)
    if checkpoint is None:
        return store, state, -1
    mine = Alike(state)
    store.load({"state": state}, rank_parts={"mine": mine}, checkpoint=checkpoint)
    assert state.step == mine.step == checkpoint.step
    return store, state, state.step


def save_for_ever(root: str, world: World) -> None:
    store, state, first = restore(root, world)
    for state.step in itertools.count(first + 1):
        parts = {"mine": Alike(state)}
        store.save({"state": state}, rank_parts=parts, step=state.step, epoch=0, metrics={}, meta={})
        if world.is_main and state.step == first + 1:
            print("saving", flush=True)


def victim(root: str, rank: int, size: int, meeting: str) -> None:
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    save_for_ever(root, World.attach("cpu"))


def nursery() -> None:
    """Read "<root> <size> <meeting>", fork `size` processes and print their ids; wait for them on an empty line."""
    children: list[int] = []
    for line in sys.stdin:
        if not line.strip():
            ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
            print(*ended, flush=True)
            children.clear()
            continue
        root, size, meeting = line.split()
        for rank in range(int(size)):
            pid = os.fork()
            if pid == 0:
                try:
                    victim(root, rank, int(size), meeting)
                finally:
                    os._exit(1)
            children.append(pid)
        print(*children, flush=True)


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.promises.test_a_killed_save_leaves_no_checkpoint"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    yield process
    process.communicate()
    assert process.returncode == 0


def await_partial_save(root: Path) -> None:
    """Return as soon as the folder of an unfinished save is seen, or after five seconds."""
    end = time.monotonic() + 5
    while time.monotonic() < end and not any(each.name.startswith(".partial-") for each in root.iterdir()):
        pass


@pytest.mark.parametrize(("size", "kills"), [(1, 8), pytest.param(1, 20, marks=pytest.mark.extended), (2, 5)])
def test_the_newest_checkpoint_loads_after_every_kill(
    tmp_path: Path, forks: subprocess.Popen[str], size: int, kills: int
) -> None:
    assert forks.stdin is not None
    assert forks.stdout is not None

    def ask(line: str) -> str:
        assert forks.stdin is not None
        assert forks.stdout is not None
        forks.stdin.write(line + "\n")
        forks.stdin.flush()
        return forks.stdout.readline()

    root, chance = tmp_path / "checkpoints", random.Random(17)
    root.mkdir()
    newest, torn, kill = -1, 0, 0
    while kill < kills or (torn < kills // 4 and kill < 10 * kills):
        pids = [int(pid) for pid in ask(f"{root} {size} {tmp_path}/meeting-{kill}").split()]
        try:
            assert forks.stdout.readline() == "saving\n"
            time.sleep(chance.uniform(0.0, 0.15 * size))
            if kill % 2:  # every second one while a save is seen, the others at any moment
                await_partial_save(root)
        finally:
            for pid in chance.sample(pids, len(pids)):  # one rank dies shortly before the others
                os.kill(pid, signal.SIGKILL)
                time.sleep(0.01 * (size - 1))
            ended = ask("")
        assert str(-signal.SIGKILL) in ended
        torn += any(each.name.startswith(".partial-") for each in root.iterdir())
        _, _, step = restore(str(root), World.single("cpu"))
        assert step >= newest, "a checkpoint that was committed is gone"
        newest, kill = step, kill + 1
        assert all(each.name.startswith("step-") for each in root.iterdir()), "leftovers are removed at the next start"
    print(f"{kill} kills, {torn} of them left a torn save, the newest checkpoint is of step {newest}")
    assert newest >= kills - 1
    assert torn >= kills // 4, "the kills were to fall into saves"


if __name__ == "__main__":
    nursery()
