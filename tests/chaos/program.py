"""The program of each rank: a small training that reports what it starts and what it has done."""

from __future__ import annotations

import errno
import faulthandler
import hashlib
import os
import random
import signal
import time
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import fsspec
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from torch.utils.data import DataLoader

from headway.datasets.stream import ParquetStream
from headway.trainer import Callback, CheckpointConfig, Duration, ParallelConfig, Trainer, World
from headway.trainer.callbacks import Ema
from headway.trainer.distributed.dtensor import to_full_tensor
from headway.trainer.loop import control
from headway.trainer.loop.run_state import COMPONENTS
from tests.chaos.schedule import Training
from tests.tiny import Rows, TinyConfig, TinyTrainer, weights

BATCH = 8
PAUSE_S = 0.002


class SlowFiles(LocalFileSystem):
    """Local files behind a URI, with slow calls, of which some fail."""

    protocol = ("slow", "failing")
    chance = random.Random(0)
    failing = 0.0

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return path.split("://", 1)[1] if isinstance(path, str) and "://" in path else super()._strip_protocol(path)

    def put_file(self, *args: Any, **kwargs: Any) -> Any:
        self._dawdle()
        return super().put_file(*args, **kwargs)

    def pipe_file(self, *args: Any, **kwargs: Any) -> Any:
        self._dawdle()
        return super().pipe_file(*args, **kwargs)

    def _dawdle(self) -> None:
        time.sleep(self.chance.random() * 0.01)
        if self.chance.random() < self.failing:
            raise OSError(errno.EIO, "the storage does not answer")


for _protocol in SlowFiles.protocol:
    fsspec.register_implementation(_protocol, SlowFiles, clobber=True)


@dataclass(frozen=True, kw_only=True)
class ChaosConfig(TinyConfig):
    parquet: str | None = None
    pause_s: float = PAUSE_S


class ChaosTrainer(TinyTrainer):
    """A trainer with everything that a resume can get wrong, over numbered rows."""

    def configure_dataloaders(self) -> Any:
        config: Any = self.config
        if config.parquet is None:
            return super().configure_dataloaders()
        return ParquetStream(config.parquet, shards=8, engine="threads"), DataLoader(Rows(10), batch_size=3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(self.config.pause_s)  # type: ignore[attr-defined]
        return super().training_step(batch, batch_idx)


class Tells(Callback):
    """Reports what was done and what starts through a pipe, which no signal or full disk affects."""

    def __init__(self, tell: Connection) -> None:
        self.tell = tell

    def on_restored(self, trainer: Trainer[Any]) -> None:
        self.tell.send(("fit", trainer.global_step))

    def on_fit_start(self, trainer: Trainer[Any]) -> None:
        self.tell.send(("fit", trainer.global_step))

    def on_step_end(self, trainer: Trainer[Any]) -> None:
        assert isinstance(trainer, TinyTrainer)
        rows, trainer.seen = [row for _, rows in trainer.seen for row in rows], []
        self.tell.send(("step", trainer.global_step, trainer.current_epoch, rows))

    def on_evaluation_start(self, trainer: Trainer[Any]) -> None:
        self.tell.send(("evaluation", trainer.global_step))

    def on_checkpoint_saved(self, trainer: Trainer[Any], checkpoint: Any) -> None:
        self.tell.send(("saved", checkpoint.step))


def config_of(training: Training, data: str) -> ChaosConfig:
    return ChaosConfig(
        parquet=data if training.data == "parquet" else None,
        max_epochs=training.epochs,
        global_batch_size=BATCH,
        micro_batch_size=training.micro_batch_size,
        dropout=0.2,
        exact=training.exact,
        noise=0.1,
        width=16,
        max_grad_norm=1.0,
        log_every=Duration(training.log_every, "steps"),
        evaluate_every=training.evaluate_every and Duration(training.evaluate_every, "steps"),  # type: ignore[arg-type]
        parallel=ParallelConfig(strategy=training.strategy),
        checkpoint=CheckpointConfig(
            every=Duration(training.every, "steps"),
            background=training.background,
            keep_last=training.keep_last,
            save_best=training.save_best,
        ),
    )


def run_rank(
    rank: int,
    ranks: int,
    training: Training,
    run_dir: str,
    data: str,
    meeting: str,
    failing: float,
    chance: str,
    tell: Connection,
    output: Connection,
) -> None:
    """The main function of a process: join the other ranks, train, and report the digests of the result."""
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    control.WITHIN_S = 0.0
    SlowFiles.chance, SlowFiles.failing = random.Random(f"{chance} {rank}"), failing
    warnings.simplefilter("default")
    tell.send(("start",))
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    world = World.attach("cpu")
    callbacks: list[Any] = [Ema(0.9)] if training.averages else []
    trainer = ChaosTrainer(
        config_of(training, data), run_dir=run_dir, world=world, callbacks=[*callbacks, Tells(tell)], trackers=()
    )
    try:
        result = trainer.fit(restore=[each for each in COMPONENTS if each != training.forgets])
    except Exception as error:
        tell.send(("raised", f"{type(error).__name__}: {error}"))
        raise
    digests = digest(trainer, callbacks) if result.status == "completed" else {}
    tell.send(("ended", result.status, result.steps, digests))
    if ranks > 1:
        dist.destroy_process_group()


def digest(trainer: ChaosTrainer, callbacks: list[Any]) -> dict[str, str]:
    """Return digests of the result of a training. Every rank must call this."""
    moments = {
        f"{index}.{name}": to_full_tensor(value)
        for index, state in trainer.optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }
    averages = {
        f"{model}.{name}": to_full_tensor(value)
        for callback in callbacks
        for model, each in callback.weights().items()
        for name, value in each.items()
    }
    scheduler = repr(sorted((name, repr(value)) for name, value in trainer.scheduler.state_dict().items()))
    return {
        "weights": _sum(weights(trainer)),
        "moments": _sum(moments),
        "averages": _sum(averages),
        "scheduler": hashlib.sha256(scheduler.encode()).hexdigest()[:16],
    }


def _sum(tensors: dict[str, torch.Tensor]) -> str:
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()[:16]
