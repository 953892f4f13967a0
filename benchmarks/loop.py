"""The training loop compared with a hand-written one: AdamW, cosine schedule, clip 1.0, loss logged every 50 steps."""

from __future__ import annotations

import io
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from headway.trainer import Callback, CheckpointConfig, ParallelConfig, Trainer, TrainerConfig, World
from headway.trainer.callbacks import EarlyStopping, ProgressBar, Throughput, TimeLimit

from .table import Row, interleave, median_ratio

LOG_EVERY = 50


def make_mlp() -> nn.Module:
    """Return a model so small that a step is all overhead."""
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


class Transformer(nn.Module):
    """A model whose step takes 20 to 50 ms on one core."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 128)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Linear(128, 256)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x_BTC = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return self.head(x_BTC).flatten(0, 1)


Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]


def mlp_batches(steps: int, world: World) -> Batches:
    return [(torch.randn(8, 16), torch.randint(0, 4, (8,))) for _ in range(steps)]


def token_loader(steps: int, world: World) -> Batches:
    tokens_NT = torch.randint(0, 256, (4 * steps * world.size, 65))
    return DataLoader(TensorDataset(tokens_NT[:, :-1], tokens_NT[:, 1:]), batch_size=4, shuffle=True)


def token_batches(steps: int, world: World) -> Batches:
    return list(token_loader(steps, world))[:steps]


@dataclass(frozen=True)
class Case:
    """The model and data that both loops train."""

    make_model: Callable[[], nn.Module]
    make_batches: Callable[[int, World], Batches]
    steps: int
    pairs: int


# Many short pairs, so that a busy moment of the machine affects few of them.
MLP = Case(make_mlp, mlp_batches, steps=200, pairs=75)
TRANSFORMER = Case(Transformer, token_loader, steps=50, pairs=21)
# The length of an iterable is unknown, so the ranks communicate before every batch.
TRANSFORMER_ITERABLE = Case(Transformer, token_batches, steps=50, pairs=11)


class BenchTrainer(Trainer[TrainerConfig]):
    """The training of `ByHand`, written with Headway."""

    case: Case

    def configure_models(self) -> None:
        with torch.device("cpu"):
            self.model = self.case.make_model()

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=1_000_000)

    def configure_dataloaders(self) -> Any:
        return self.case.make_batches(self.case.steps, self.world)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self.model(x), y.flatten())


class ByHand:
    """The hand-written loop."""

    def __init__(self, case: Case, world: World) -> None:
        self.model = case.make_model()
        if world.size > 1:
            self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=1_000_000)
        self.batches = case.make_batches(case.steps, world)
        self.sampler: DistributedSampler[Any] | None = None
        if isinstance(self.batches, DataLoader):
            self.sampler = DistributedSampler(self.batches.dataset, world.size, world.rank)
            self.batches = DataLoader(self.batches.dataset, self.batches.batch_size, sampler=self.sampler)
        self.epoch = 0
        self.losses: list[float] = []

    def train_epoch(self) -> None:
        self.epoch += 1
        if self.sampler is not None:
            self.sampler.set_epoch(self.epoch)
        for step, (x, y) in enumerate(self.batches, 1):
            loss = F.cross_entropy(self.model(x), y.flatten())
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()
            if step % LOG_EVERY == 0:
                self.losses.append(loss.item())


class Idle(Callback):
    """A callback with hooks in every update that do nothing."""

    def on_batch_end(self, trainer: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass

    def on_gradients_ready(self, trainer: Any) -> None:
        pass

    def on_step_end(self, trainer: Any) -> None:
        pass


def usual_callbacks() -> list[Callback]:
    """Return the callbacks of a typical run. The non-finite check and JSON lines are always active."""
    bar = ProgressBar(io.StringIO(), live=True)
    return [bar, Throughput(peak_flops=1e12), EarlyStopping(), TimeLimit("1d"), Idle(), Idle(), Idle()]


def measure(
    case: Case, world: World, *, callbacks: Sequence[Callback] = (), run_dir: str | None = None
) -> list[tuple[float, float]]:
    """Return interleaved pairs of seconds per update: (Headway, by hand)."""
    config = TrainerConfig(
        max_steps=10**9,
        max_grad_norm=1.0,
        log_every=f"{LOG_EVERY} steps",  # type: ignore[arg-type]
        parallel=ParallelConfig(strategy="ddp"),
        # The hand-written loop saves nothing either.
        checkpoint=CheckpointConfig(every=None, at_end=False),
    )
    trainer = type("Bench", (BenchTrainer,), {"case": case})(
        config, world=world, callbacks=callbacks, run_dir=run_dir, show_progress=False
    )
    by_hand = ByHand(case, world)
    trainer.setup()
    # `fit` does this before the first epoch. Without `fit`, the epochs of both loops can be interleaved.
    trainer._engine.loop.recorder.start(resumed=False, began_s=time.perf_counter())
    trainer.callbacks.on_fit_start()

    def ours() -> float:
        began_s = time.perf_counter()
        trainer.train_epoch()
        return (time.perf_counter() - began_s) / case.steps

    def theirs() -> float:
        began_s = time.perf_counter()
        by_hand.train_epoch()
        return (time.perf_counter() - began_s) / case.steps

    ours(), theirs()
    measured = interleave(ours, theirs, pairs=case.pairs)
    assert trainer.global_step == (case.pairs + 1) * case.steps
    return measured


def rows() -> list[Row]:
    """Measure all rows."""
    torch.set_num_threads(1)
    world = World.single("cpu")
    with tempfile.TemporaryDirectory() as folder:
        with_callbacks = measure(MLP, world, callbacks=usual_callbacks(), run_dir=folder)
    table = [
        tiny_row("tiny MLP", measure(MLP, world), most_us=20),
        tiny_row("tiny MLP, usual callbacks", with_callbacks, most_us=30),
    ]
    cases: dict[str, tuple[list[tuple[float, float]], float | None]] = {
        "one process": (measure(TRANSFORMER, world), 1.02),
        "two gloo ranks": (on_two_ranks(TRANSFORMER), 1.02),
        "two gloo ranks, any iterable": (on_two_ranks(TRANSFORMER_ITERABLE), None),
    }
    for name, (measured, target) in cases.items():
        ours_ms, theirs_ms = (statistics.median(column) * 1e3 for column in zip(*measured, strict=True))
        ratio = median_ratio(measured)
        what = f"loop, transformer, {name}"
        table.append(
            Row(
                what,
                f"{ours_ms:.1f} ms",
                f"{theirs_ms:.1f} ms",
                ratio,
                f"<= {target}" if target else "-",
                not target or ratio <= target,
            )
        )
    return table


def tiny_row(what: str, measured: list[tuple[float, float]], *, most_us: float) -> Row:
    """Return a row whose target is the extra time per update instead of the ratio."""
    extra_us = statistics.median(ours - theirs for ours, theirs in measured) * 1e6
    ours_us, theirs_us = (statistics.median(column) * 1e6 for column in zip(*measured, strict=True))
    return Row(
        f"loop, {what}: {extra_us:+.1f} us per update",
        f"{ours_us:.0f} us",
        f"{theirs_us:.0f} us",
        ours_us / theirs_us,
        f"<= +{most_us:g} us",
        extra_us <= most_us,
    )


def on_two_ranks(case: Case) -> list[tuple[float, float]]:
    """Measure a case under DDP on two processes; return the times of the main rank."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(rank, folder, sender, case)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        measured: list[tuple[float, float]] = receiver.recv()
        for rank in ranks:
            rank.join()
    return measured


def _rank(rank: int, folder: str, sender: Any, case: Case) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    measured = measure(case, World.attach("cpu"))
    if rank == 0:
        sender.send(measured)
    dist.destroy_process_group()
