"""The cost of saving and of resuming: the time that training loses, CPU time, memory, and the time to a commit.

Training uses one thread and the other core is free, as the host of a GPU is most of the time. A model of 201 MB with
AdamW has 604 MB of state. A stall is the longest update around a save, with everything that a save does in the training
thread, less the usual update.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from headway.trainer import CheckpointConfig, Trainer, TrainerConfig, World

from .table import Row, interleave, median_ratio

WIDTH, ROWS = 1024, 96
LAYERS, SMALL = 48, 16  # 604 MB and 201 MB of state
STEPS, PAIRS, ROUNDS, FIRSTS, USUAL = 20, 7, 4, 3, 5
DISK = os.environ.get("HEADWAY_BENCH_DISK", "build")


class Wide(Trainer[TrainerConfig]):
    """A model with updates of about 400 ms on one core."""

    layers = LAYERS

    def configure_models(self) -> None:
        self.model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(self.layers)])

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def configure_dataloaders(self) -> Any:
        return [torch.randn(ROWS, WIDTH) for _ in range(STEPS)]

    def training_step(self, x: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return F.mse_loss(self.model(x), x)


class Narrow(Wide):
    """A third of the layers, with updates of about 150 ms."""

    layers = SMALL


class Many(Trainer[TrainerConfig]):
    """A thousand small parameters, with four thousand tensors of state."""

    layers = 500

    def configure_models(self) -> None:
        self.model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(self.layers)])

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def configure_dataloaders(self) -> Any:
        return [torch.randn(4, 16) for _ in range(STEPS)]

    def training_step(self, x: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return F.mse_loss(self.model(x), x)


class Fewer(Many):
    """Small parameters with a thousand tensors of state."""

    layers = 125


def make_trainer(kind: type[Any], folder: str, *, every: str | None = None, world: World | None = None) -> Any:
    checkpoint = CheckpointConfig(every=every, at_end=False, keep_last=1)  # type: ignore[arg-type]
    config = TrainerConfig(max_steps=10**9, log_every="1000 steps", checkpoint=checkpoint)  # type: ignore[arg-type]
    trainer = kind(config, run_dir=folder, world=world or World.single("cpu"), show_progress=False)
    trainer.train_epoch()
    # No save should be due at the end of an epoch, where `train_epoch` waits for it and `fit` does not.
    for _ in range(5):
        trainer.train_step(torch.randn(ROWS, WIDTH) if not issubclass(kind, Many) else torch.randn(4, 16))
    return trainer


def seconds(do: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    do()
    return time.perf_counter() - began_s


def time_lost(folder: str) -> list[Row]:
    """Compare a checkpoint every ten updates with none: time, and CPU time of all threads including the writers."""
    saving, plain = (make_trainer(Narrow, f"{folder}/{every}", every=every) for every in ("10 steps", None))
    cpu_s: dict[Wide, list[float]] = {saving: [], plain: []}

    def epoch(trainer: Wide) -> float:
        began_s = time.process_time()
        taken_s = seconds(trainer.train_epoch)
        cpu_s[trainer].append(time.process_time() - began_s)
        return taken_s

    measured = interleave(lambda: epoch(saving), lambda: epoch(plain), pairs=PAIRS)
    saving.save_checkpoint()
    ours_s, theirs_s = (statistics.median(column) / STEPS for column in zip(*measured, strict=True))
    ratio = median_ratio(measured)
    ours_cpu_s, theirs_cpu_s = (statistics.median(column) / STEPS for column in cpu_s.values())
    cpu_ratio = median_ratio(list(zip(*cpu_s.values(), strict=True)))
    return [
        Row(
            "save: an update, with a checkpoint every 10", f"{ours_s * 1e3:.0f} ms", f"{theirs_s * 1e3:.0f} ms", ratio,
            "<= 1.01", ratio <= 1.01,
        ),
        Row(
            "save: its CPU time, including the writers", f"{ours_cpu_s * 1e3:.0f} ms", f"{theirs_cpu_s * 1e3:.0f} ms",
            cpu_ratio, "reported", True,
        ),
    ]  # fmt: skip


def other_threads_s() -> float:
    """Return the CPU time of all threads but this one, in which training and its backward passes run."""
    return time.process_time() - time.thread_time()


class Cost(NamedTuple):
    """What one save costs, in seconds: the longest update less the usual one, all updates, the commit, CPU time.

    CPU time is that of beginning the save, and of all threads but the training one until it has ended.
    """

    stall: float
    lost: float
    complete: float
    cpu: float


def cost_of(trainer: Wide, begin: Callable[[], Callable[[], bool]], period_s: float) -> Cost:
    """Begin a save and train for a period; `begin` returns a function that tells whether the save has ended."""
    batch = torch.randn(ROWS, WIDTH)
    usual_others_s = other_threads_s()
    usual = [seconds(lambda: trainer.train_step(batch)) for _ in range(USUAL)]
    usual_others_s = (other_threads_s() - usual_others_s) / USUAL
    usual_s = statistics.median(usual)
    began_s, began_cpu_s, updates, complete_s = time.perf_counter(), time.process_time(), [], None
    is_done = begin()
    begin_cpu_s, others_began_s, at_s = time.process_time() - began_cpu_s, other_threads_s(), began_s
    # All ranks make as many updates.
    while trainer.world.broadcast(complete_s is None or at_s - began_s < period_s):
        trainer.train_step(batch)
        now_s = time.perf_counter()
        updates.append(now_s - at_s)
        at_s = now_s
        if complete_s is None and is_done():
            complete_s = now_s - began_s
    cpu_s = begin_cpu_s + other_threads_s() - others_began_s - usual_others_s * len(updates)
    return Cost(max(updates) - usual_s, sum(updates) - usual_s * len(updates), complete_s, cpu_s)


def ways_to_save(trainer: Wide, folder: str) -> dict[str, Callable[[], Callable[[], bool]]]:
    """Return functions that begin a save of the trainer's state, each in its way."""
    state = {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
    # It keeps its buffers; its other ways to copy need a GPU.
    stager = DefaultStager(StagingOptions(False, False, False, False))
    # Its thread communicates at the same time as the training.
    group = dist.new_group(backend="gloo") if trainer.world.size > 1 else None
    plugin = AsyncCheckpointIO(TorchCheckpointIO())
    saver = trainer._engine.loop.saver
    numbers = iter(range(10**6))

    def ours() -> Callable[[], bool]:
        saving = saver.start()
        return lambda: bool(saving.is_done)

    def torch_save() -> Callable[[], bool]:
        # The last two are kept, as by the others.
        if trainer.world.is_main:
            torch.save(state, f"{folder}/{next(numbers) % 2}.pt")
        return lambda: True

    def dcp_save() -> Callable[[], bool]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            path = f"{folder}/dcp-{next(numbers) % 2}"
            future: Any = dcp.async_save(state, checkpoint_id=path, async_stager=stager, process_group=group)
        return lambda: bool(future.done())

    def lightning_save() -> Callable[[], bool]:
        if not trainer.world.is_main:
            return lambda: True
        plugin.save_checkpoint(state, f"{folder}/lightning-{next(numbers) % 2}.ckpt")
        # It runs one save at a time, so a task that is submitted now ends after this save.
        after: Any = plugin._executor.submit(int)
        return lambda: bool(after.done())

    return {"ours": ours, "torch.save": torch_save, "DCP async_save": dcp_save, "Lightning": lightning_save}


def costs(folder: str, where: str, period_s: float, world: World | None = None) -> list[Row]:
    """Compare what saves cost, the second and later ones; in turn, so that a busy moment affects all alike."""
    trainer = make_trainer(Wide, f"{folder}/costs", world=world)
    ways = ways_to_save(trainer, folder)
    measured: dict[str, list[Cost]] = {name: [] for name in ways}
    for number in range(ROUNDS + 1):
        for name, begin in ways.items():
            cost = cost_of(trainer, begin, period_s)
            if number:  # the first allocates memory
                measured[name].append(cost)
        trainer._engine.loop.saver.finish()
    rows = []
    for other in list(ways)[1:]:
        # The stall of torch.save is all of its time. The others copy the state first.
        targets = ("1/20", "0.1 s", "1.4", "1.2") if other == "torch.save" else ("reported",) * 4
        limits = (1 / 20, None, 1.4, 1.2)
        for index, what in enumerate(Cost._fields):
            pairs = [(one[index], two[index]) for one, two in zip(measured["ours"], measured[other], strict=True)]
            ours_s, theirs_s = (statistics.median(column) for column in zip(*pairs, strict=True))
            limit, ratio = limits[index], ours_s / theirs_s
            ok = targets[0] == "reported" or (ours_s <= 0.1 if limit is None else ratio <= limit)
            rows.append(
                Row(
                    f"save to {where} every {period_s:g} s: {what}, {other}", f"{ours_s * 1e3:.0f} ms",
                    f"{theirs_s * 1e3:.0f} ms", ratio, f"<= {targets[index]}".replace("<= reported", "reported"), ok,
                )
            )  # fmt: skip
    return rows


def costs_on_two_ranks(folder: str, period_s: float) -> list[Row]:
    """Compare what saves cost under DDP on two processes, each of which saves half of the state."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    ranks = [context.Process(target=_rank, args=(rank, folder, period_s, sender)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    measured: list[Row] = receiver.recv()
    for rank in ranks:
        rank.join()
    return measured


def _rank(rank: int, folder: str, period_s: float, sender: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    measured = costs(folder, "memory, two ranks", period_s, World.attach("cpu"))
    if rank == 0:
        sender.send(measured)
    dist.destroy_process_group()


def first_stall(folder: str) -> Row:
    """Measure the stall of the first save of a process, for which memory was allocated after the first update."""
    pairs = []
    for number in range(FIRSTS):
        trainer = make_trainer(Wide, f"{folder}/first-{number}", every="1000000 steps")
        ways = ways_to_save(trainer, folder)
        pairs.append((cost_of(trainer, ways["ours"], 0).stall, cost_of(trainer, ways["torch.save"], 0).stall))
        trainer._engine.loop.saver.finish()
    ours_s, theirs_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    return Row(
        "save: stall of the first one, torch.save", f"{ours_s * 1e3:.0f} ms", f"{theirs_s * 1e3:.0f} ms",
        ours_s / theirs_s, "<= 1/100", ours_s <= theirs_s / 100,
    )  # fmt: skip


def begin_of_many(folder: str, kind: type[Many] = Many) -> Row:
    """Measure the begin of a save on the training thread."""
    trainer = make_trainer(kind, f"{folder}/many")
    saver, taken = trainer._engine.loop.saver, []
    for _ in range(12):
        taken.append(seconds(saver.start))
        trainer.train_step(torch.randn(4, 16))
        saver.finish()
    begin_s = statistics.median(taken[1:])
    return Row(
        f"save: begin, {8 * kind.layers:,} tensors of {2 * kind.layers:,} parameters", f"{begin_s * 1e3:.1f} ms",
        "5 ms", begin_s / 5e-3, "<= 1", begin_s <= 5e-3,
    )  # fmt: skip


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep as many processes busy."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_spin, daemon=True) for _ in range(count)]
    for each in processes:
        each.start()
    try:
        yield
    finally:
        for each in processes:
            each.terminate()
            each.join()


def _spin() -> None:
    while True:
        pass


def deadline(folder: str) -> list[Row]:
    """Compare a save that training waits for, as before a machine is taken away, idle and beside busy processes."""
    trainer = make_trainer(Wide, f"{folder}/deadline")
    ways, rows = ways_to_save(trainer, folder), []
    trainer.save_checkpoint()
    for count in (0, 2):
        with busy_processes(count):
            pairs = interleave(
                lambda: seconds(trainer.save_checkpoint), lambda: seconds(ways["torch.save"]), pairs=ROUNDS
            )
        ours_s, theirs_s = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = median_ratio(pairs)
        rows.append(
            Row(
                f"save: to its commit, beside {count} busy processes, torch.save", f"{ours_s * 1e3:.0f} ms",
                f"{theirs_s * 1e3:.0f} ms", ratio, "<= 1", ratio <= 1.0,
            )
        )  # fmt: skip
    return rows


def resume(folder: str) -> Row:
    """Compare restoring a run, verification included, with torch.load of the same state."""
    trainer = make_trainer(Wide, f"{folder}/resume")
    path = trainer.save_checkpoint().path
    ways_to_save(trainer, folder)["torch.save"]()
    state = trainer._engine.loop._state

    def theirs() -> None:
        loaded = torch.load(f"{folder}/0.pt")
        trainer.model.load_state_dict(loaded["model"])
        trainer.optimizer.load_state_dict(loaded["optimizer"])

    pairs = interleave(lambda: seconds(lambda: state.restore(path)), lambda: seconds(theirs), pairs=ROUNDS)
    ours_s, theirs_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = median_ratio(pairs)
    return Row(
        "resume, verification included, torch.load", f"{ours_s * 1e3:.0f} ms", f"{theirs_s * 1e3:.0f} ms", ratio,
        "<= 1.2", ratio <= 1.2,
    )  # fmt: skip


def memory() -> Row:
    """Measure how much saving in the background raises the peak resident set, relative to the size of the state."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_rise, args=(sender,))
    process.start()
    rise_bytes, state_bytes = receiver.recv()
    process.join()
    ratio = rise_bytes / state_bytes
    return Row(
        "save: peak memory above the process", f"{rise_bytes / 1e6:.0f} MB", f"{state_bytes / 1e6:.0f} MB", ratio,
        "<= 1.1", ratio <= 1.1,
    )  # fmt: skip


def _rise(sender: Any) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(Narrow, folder)
        before = _peak_bytes()
        trainer._engine.loop.saver.start()
        trainer.train_epoch()
        trainer.save_checkpoint()
        sender.send((_peak_bytes() - before, 3 * sum(each.nbytes for each in trainer.model.parameters())))


def _peak_bytes() -> int:
    """Return the peak resident set of this process; getrusage would include that of its parent."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def rows() -> list[Row]:
    """Measure all rows."""
    torch.set_num_threads(1)
    measured: list[Row] = []
    Path(DISK).mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as fast, tempfile.TemporaryDirectory(dir=DISK) as disk:
        measured += time_lost(fast)
        for name, folder in (("memory", fast), ("disk", disk)):
            for period_s in (2.4, 10.0):
                with tempfile.TemporaryDirectory(dir=folder) as own:
                    measured += costs(own, name, period_s)
        with tempfile.TemporaryDirectory(dir=fast) as own:
            measured += costs_on_two_ranks(own, 2.4)
        for measure in (first_stall, begin_of_many, partial(begin_of_many, kind=Fewer), resume):
            with tempfile.TemporaryDirectory(dir=fast) as own:
                measured.append(measure(own))
        with tempfile.TemporaryDirectory(dir=fast) as own:
            measured += deadline(own)
    return [*measured, memory()]
