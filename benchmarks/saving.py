"""The cost of saving: the time that training loses, the memory used, and the share of the checksums."""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from headway.trainer import CheckpointConfig, Trainer, TrainerConfig, World
from headway.trainer.checkpoints.format.file_checksums import ChecksummedFile
from headway.trainer.checkpoints.tensor_checksums import TensorChecksum

from .table import Row, interleave, median_ratio

WIDTH, LAYERS, ROWS = 1024, 16, 96
STATE_BYTES = 3 * 4 * LAYERS * (WIDTH**2 + WIDTH)  # weights and two moments, 200 MB
STEPS, PAIRS, SAVES = 20, 7, 7


class Wide(Trainer[TrainerConfig]):
    """A model of 67 MB with updates of about 200 ms on one core."""

    def configure_models(self) -> None:
        self.model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def configure_dataloaders(self) -> Any:
        return [torch.randn(ROWS, WIDTH) for _ in range(STEPS)]

    def training_step(self, x: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return F.mse_loss(self.model(x), x)


def make_trainer(folder: str, *, saves: bool) -> Wide:
    checkpoint = CheckpointConfig(every="10 steps" if saves else None, at_end=False)  # type: ignore[arg-type]
    config = TrainerConfig(max_steps=10**9, log_every="1000 steps", checkpoint=checkpoint)  # type: ignore[arg-type]
    trainer = Wide(config, run_dir=folder, world=World.single("cpu"), show_progress=False)
    trainer.train_epoch()
    # No save should be due at the end of an epoch, where `train_epoch` waits for it and `fit` does not.
    for _ in range(5):
        trainer.train_step(torch.randn(ROWS, WIDTH))
    return trainer


def seconds(do: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    do()
    return time.perf_counter() - began_s


def time_lost(folder: str) -> list[Row]:
    """Compare a checkpoint every ten updates with none: time, and CPU time of all threads including the writers."""
    saving, plain = make_trainer(f"{folder}/saving", saves=True), make_trainer(f"{folder}/plain", saves=False)
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


def stalls(folder: str) -> list[Row]:
    """Measure how long one save blocks training: to start it, and before the optimizer may step."""
    trainer = make_trainer(f"{folder}/stalls", saves=False)
    batch = torch.randn(ROWS, WIDTH)
    state = {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}

    def ours() -> float:
        began_s = time.perf_counter()
        saving = trainer._engine.loop.saver.start()
        stall_s = time.perf_counter() - began_s
        F.mse_loss(trainer.model(batch), batch).backward()
        stall_s += seconds(saving.wait_for_snapshot)
        trainer.optimizer.zero_grad()
        trainer._engine.loop.saver.finish()
        return stall_s

    def asynchronous(number: int, kind: AsyncCheckpointerType) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            began_s = time.perf_counter()
            future: Any = dcp.async_save(
                state, checkpoint_id=f"{folder}/{kind.value}-{number}", async_checkpointer_type=kind
            )
            stall_s = time.perf_counter() - began_s
            future.result()
        return stall_s

    ours()  # allocates the memory for the copies, once
    # AsyncCheckpointerType.PROCESS needs a process group, so both get one.
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    asynchronous(-1, AsyncCheckpointerType.PROCESS)  # starts it
    others: dict[str, tuple[Callable[[int], float], float]] = {
        "torch.save": (lambda number: seconds(lambda: torch.save(state, f"{folder}/{number}.pt")), 100.0),
        "DCP async_save, thread": (lambda number: asynchronous(number, AsyncCheckpointerType.THREAD), 5.0),
        "DCP async_save, process": (lambda number: asynchronous(number, AsyncCheckpointerType.PROCESS), 5.0),
    }
    rows = []
    for name, (theirs, target) in others.items():
        numbers = iter(range(100))
        pairs = interleave(ours, lambda theirs=theirs, numbers=numbers: theirs(next(numbers)), pairs=SAVES)
        mine_s, their_s = (statistics.median(column) for column in zip(*pairs, strict=True))
        smaller = statistics.median(their / mine for mine, their in pairs)
        rows.append(
            Row(
                f"save: stall, compared with {name}",
                f"{mine_s * 1e3:.1f} ms",
                f"{their_s * 1e3:.1f} ms",
                1 / smaller,
                f"<= 1/{target:g}",
                smaller >= target,
            )  # fmt: skip
        )
    dist.destroy_process_group()
    return rows


def checksums(folder: str) -> list[Row]:
    """Measure the share of the checksums in a blocking save: of time and of CPU time."""
    trainer = make_trainer(f"{folder}/sums", saves=False)
    cpu_s: dict[str, list[float]] = {"with": [], "without": []}

    def save(kind: str) -> float:
        began_s = time.process_time()
        taken_s = seconds(trainer.save_checkpoint)
        cpu_s[kind].append(time.process_time() - began_s)
        return taken_s

    def only_write(self: ChecksummedFile, data: Any, read: Any) -> Future[TensorChecksum]:
        view = memoryview(data).cast("B")
        self._size += len(view)
        self._file.write(view)
        nothing: Future[TensorChecksum] = Future()
        nothing.set_result(TensorChecksum("none", 0, 0))
        return nothing

    def without() -> float:
        with mock.patch.object(ChecksummedFile, "write_and_read", only_write):
            return save("without")

    trainer.save_checkpoint()
    measured = interleave(lambda: save("with"), without, pairs=SAVES)
    rows = []
    for what, pairs, target in (
        ("checksums in a save", measured, "<= 0.05"),
        ("their CPU in that of a save", list(zip(*cpu_s.values(), strict=True)), "reported"),
    ):
        ours_s, theirs_s = (statistics.median(column) for column in zip(*pairs, strict=True))
        share = statistics.median((ours - theirs) / ours for ours, theirs in pairs)
        rows.append(
            Row(
                f"save: {what}", f"{(ours_s - theirs_s) * 1e3:.0f} ms", f"{ours_s * 1e3:.0f} ms", share,
                target, target == "reported" or share <= 0.05,
            )
        )  # fmt: skip
    return rows


def memory() -> Row:
    """Measure how much saving in the background raises the peak resident set, relative to the size of the state."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_rise, args=(sender,))
    process.start()
    rise_bytes: int = receiver.recv()
    process.join()
    ratio = rise_bytes / STATE_BYTES
    return Row(
        "save: peak memory above the process", f"{rise_bytes / 1e6:.0f} MB", f"{STATE_BYTES / 1e6:.0f} MB", ratio,
        "<= 1.1", ratio <= 1.1,
    )  # fmt: skip


def _rise(sender: Any) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder, saves=False)
        before = _peak_bytes()
        trainer._engine.loop.saver.start()
        trainer.train_epoch()
        trainer.save_checkpoint()
        sender.send(_peak_bytes() - before)


def _peak_bytes() -> int:
    """Return the peak resident set of this process; getrusage would include that of its parent."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def rows() -> list[Row]:
    """Measure all rows."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return [*time_lost(folder), *stalls(folder), *checksums(folder), memory()]
