"""Runs a function on real ranks: separate processes connected by gloo."""

from __future__ import annotations

import contextlib
import faulthandler
import pickle
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from headway.trainer.distributed.world import World
from headway.trainer.loop import control


def run_on_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Call `fn(world, *args)` on every rank, and return the results in rank order.

    Args:
        fn: a top-level function of an importable module; its arguments and result must pickle.
        world_size: number of processes; they meet through a file, so no port is taken.
        timeout_s: after this, the error contains the Python stack of every rank.

    Raises:
        AssertionError: a rank raised, died or timed out; contains the traceback of the first failure.
    """
    context = forking()
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory(prefix="headway-ranks-") as folder:
        processes = [
            context.Process(target=_rank, args=(rank, world_size, folder, results, timeout_s, fn, args), daemon=True)
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(processes, results, timeout_s, Path(folder))
        finally:
            for process in processes:
                process.kill()
                process.join()


def forking() -> Any:
    """Return the multiprocessing context whose processes fork from a server that has imported `tests.preloaded`.

    Such a process costs 0.2 s of CPU, and starts with nothing that an earlier test has left behind. A Python process
    has one such server, so everything in the tests that wants one asks here.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    # The server imports `tests` from its current folder; a test may have changed it.
    with contextlib.chdir(Path(__file__).parents[1]):
        forkserver.ensure_running()
    return context


def _collect(processes: list[Any], results: Any, timeout_s: float, folder: Path) -> list[Any]:
    returned: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s + 5
    while len(returned) < len(processes):
        try:
            rank, error, value = results.get(timeout=0.2)
        except queue.Empty:
            dead = [r for r, p in enumerate(processes) if r not in returned and p.exitcode not in (None, 0)]
            if not dead and time.monotonic() < deadline:
                continue
            stacks = "\n".join(f"--- {file.name}\n{file.read_text()}" for file in sorted(folder.glob("stack-*")))
            what = f"rank {dead[0]} died (exit code {processes[dead[0]].exitcode})" if dead else "ranks are late"
            raise AssertionError(f"{what}; returned: {sorted(returned)}\n{stacks}") from None
        if error is not None:
            # The cause may be on a rank whose report arrives later.
            errors = [(rank, error)]
            with contextlib.suppress(queue.Empty):
                while len(errors) < len(processes):
                    rank, error, _ = results.get(timeout=1.0)
                    errors += [(rank, error)] if error is not None else []
            raise AssertionError("\n".join(f"rank {rank} raised:\n{error}" for rank, error in sorted(errors)))
        returned[rank] = pickle.loads(value)
    return [returned[rank] for rank in range(len(processes))]


def _rank(
    rank: int,
    world_size: int,
    folder: str,
    results: Any,
    timeout_s: float,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    with (Path(folder) / f"stack-{rank}").open("w") as stack:
        faulthandler.dump_traceback_later(timeout_s, file=stack, exit=True)
        torch.set_num_threads(1)
        # Ranks agree on requests after every update, so a test knows at which one a stop takes effect.
        control.WITHIN_S = 0.0
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
        try:
            value = fn(World.attach("cpu"), *args)
            dist.barrier()
            # Bytes: a tensor would be sent as a file descriptor, for which this process must stay alive.
            results.put((rank, None, pickle.dumps(value)))
        except BaseException:
            results.put((rank, traceback.format_exc(), None))
        finally:
            faulthandler.cancel_dump_traceback_later()
            results.close()
            results.join_thread()
            if dist.is_initialized():
                dist.destroy_process_group()
