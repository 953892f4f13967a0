"""A warm restart: the time to the first update of a rank that loads compiled code from its run's folder.

Every process gets an empty folder for Inductor's caches, as on a new machine. Measured from the start of `setup` to the
end of the first update, which excludes the imports; Inductor builds with g++ here.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from headway.trainer import CheckpointConfig, ParallelConfig, Trainer, TrainerConfig, World

from .table import Row, interleave, median_ratio

TARGET = 0.25
WIDTH, HEADS, LAYERS, WORDS, LENGTH = 64, 4, 4, 256, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.before(x)).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in parts)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.after(x))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Small(Trainer[TrainerConfig]):
    def configure_models(self) -> None:
        self.model = Words()

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def configure_dataloaders(self) -> Any:
        ids = torch.randint(WORDS, (64, LENGTH + 1), generator=torch.Generator().manual_seed(1))
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ids), batch_size=8)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (ids,) = batch
        return F.cross_entropy(self.model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def _train(run_dir: str, max_steps: int) -> None:
    config = TrainerConfig(
        max_steps=max_steps, parallel=ParallelConfig(compile=True), checkpoint=CheckpointConfig(every=None)
    )
    trainer = Small(config, run_dir=run_dir, world=World.single("cpu"), show_progress=False, printer=lambda text: None)
    trainer.fit()
    print("seconds", sum(trainer.setup_times.values()), dict(trainer.setup_times))


def _seconds(run_dir: str, max_steps: int) -> float:
    """Train in a new process, and return the seconds to the end of its first update."""
    with tempfile.TemporaryDirectory(prefix="headway-bench-inductor-") as caches:
        done = subprocess.run(
            [sys.executable, "-m", __spec__.name, run_dir, str(max_steps)], check=True, text=True, capture_output=True,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": caches},
        )  # fmt: skip
    return float(next(line for line in done.stdout.splitlines() if line.startswith("seconds")).split()[1])


def rows(pairs: int = 3) -> list[Row]:
    """Measure a restart with the run's compiled code, and a first start without any."""
    numbers = count(5)
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
        _seconds(f"{folder}/kept", 4)
        # Each restart resumes the run and trains one more step.
        measured = interleave(
            lambda: _seconds(f"{folder}/kept", next(numbers)),
            lambda: _seconds(f"{folder}/new-{next(numbers)}", 4),
            pairs=pairs,
        )
    ratio = median_ratio(measured)
    return [
        Row(
            "compile: start to first update, kept and new",
            f"{statistics.median(each for each, _ in measured):.1f} s",
            f"{statistics.median(each for _, each in measured):.1f} s",
            ratio,
            f"<= {TARGET}",
            ratio <= TARGET,
        )
    ]


if __name__ == "__main__":
    _train(sys.argv[1], int(sys.argv[2]))
