"""Peak memory of a rank while a sharded model is filled from safetensors files."""

from __future__ import annotations

import multiprocessing
import resource
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from headway.trainer import ParallelConfig, Trainer, TrainerConfig, World

from .table import Row

WIDTH, LAYERS, RANKS = 2048, 24, 2
MODEL_BYTES = 4 * LAYERS * (WIDTH**2 + WIDTH)  # 400 MB


def make_model() -> nn.Module:
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))


class FromShards(Trainer[TrainerConfig]):
    """Created on the meta device; each rank reads its shards."""

    file: str

    def configure_models(self) -> None:
        self.model = make_model()

    def init_weights(self) -> None:
        self.load_pretrained(self.file)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def configure_dataloaders(self) -> Any:
        return [torch.zeros(1)]


class FromWhole(FromShards):
    """Each rank loads everything, and is sharded then."""

    def configure_models(self) -> None:
        self.model = make_model()
        self.model.load_state_dict(load_file(self.file))

    init_weights = Trainer.init_weights


def _rank(rank: int, cls: type[FromShards], folder: str, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/{cls.__name__}", rank=rank, world_size=RANKS)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    config = TrainerConfig(max_steps=1, parallel=ParallelConfig(strategy="fsdp", shard_modules=("Linear",)))
    trainer = cls(config, world=World.attach("cpu"), show_progress=False, printer=lambda text: None)
    trainer.file = f"{folder}/model.safetensors"
    trainer.setup()
    results.put(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
    dist.barrier()
    dist.destroy_process_group()


def _peak_bytes(cls: type[FromShards], folder: str) -> int:
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, cls, folder, results)) for rank in range(RANKS)]
    for each in ranks:
        each.start()
    peaks = [results.get(timeout=300) for _ in ranks]
    for each in ranks:
        each.join()
    return max(peaks)


def rows() -> list[Row]:
    """Measure the growth of the largest rank's resident memory, which includes pages of the file that it has mapped."""
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
        save_file(make_model().state_dict(), Path(folder) / "model.safetensors")
        ours, theirs = _peak_bytes(FromShards, folder), _peak_bytes(FromWhole, folder)
    ratio = ours / theirs
    return [
        Row(
            f"load {MODEL_BYTES / 1e6:.0f} MB on {RANKS} ranks (fsdp), memory of a rank",
            f"{ours / 1e6:.0f} MB",
            f"{theirs / 1e6:.0f} MB",
            ratio,
            "<= 0.6",
            ratio <= 0.6,
        )
    ]
