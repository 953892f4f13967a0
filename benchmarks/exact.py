"""Exact mode compared with default mode: the same micro-batches on two gloo ranks, interleaved."""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway.trainer import CheckpointConfig, Trainer, TrainerConfig, World

from .loop import Transformer
from .table import Row, interleave, median_ratio

_STEPS, _PAIRS = 10, 11


class ExactBench(Trainer[TrainerConfig]):
    """A transformer with four micro-batches per update."""

    def configure_models(self) -> None:
        with torch.device("cpu"):
            self.model: nn.Module = Transformer()

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def configure_dataloaders(self) -> Any:
        tokens_NT = torch.randint(0, 256, (16 * _STEPS, 65), generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(tokens_NT[:, :-1], tokens_NT[:, 1:]), batch_size=4)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self.model(x), y.flatten())


def rows() -> list[Row]:
    """Measure the row."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(rank, folder, sender)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        measured, share = receiver.recv()
        for rank in ranks:
            rank.join()
    exact_ms, default_ms = (statistics.median(column) * 1e3 for column in zip(*measured, strict=True))
    name = f"exact mode, transformer, two gloo ranks: {share:.0%} spent on combining gradients"
    return [Row(name, f"{exact_ms:.1f} ms", f"{default_ms:.1f} ms", median_ratio(measured), "-", True)]


def _rank(rank: int, folder: str, sender: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    world = World.attach("cpu")
    exact, default = _trainer(world, exact=True), _trainer(world, exact=False)
    ours, theirs = _epoch(exact), _epoch(default)
    ours(), theirs()
    measured = interleave(ours, theirs, pairs=_PAIRS)
    if rank == 0:
        record = exact.history.latest
        sender.send((measured, record["exact_s"] / record["step_s"]))
    dist.destroy_process_group()


def _trainer(world: World, *, exact: bool) -> ExactBench:
    config = TrainerConfig(
        max_steps=10**9,
        global_batch_size=16,
        micro_batch_size=4,
        max_grad_norm=1.0,
        exact=exact,
        checkpoint=CheckpointConfig(every=None, at_end=False),
    )
    trainer = ExactBench(config, world=world, printer=lambda text: None)
    trainer.setup()
    # `fit` does this before the first epoch. Without `fit`, the epochs of both can be interleaved.
    trainer._engine.loop.recorder.start(resumed=False, began_s=time.perf_counter())
    return trainer


def _epoch(trainer: ExactBench) -> Callable[[], float]:
    def train() -> float:
        began_s = time.perf_counter()
        trainer.train_epoch()
        return (time.perf_counter() - began_s) / _STEPS

    return train
