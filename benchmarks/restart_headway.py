"""The program that `restart.py` runs with `headway fit`: the same training as `restart_bare.py`."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway.trainer import Trainer, TrainerConfig


@dataclass(frozen=True, kw_only=True)
class RestartConfig(TrainerConfig):
    stamps: str
    pause_s: float


class Restart(Trainer[RestartConfig]):
    def configure_models(self) -> None:
        self.model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def configure_dataloaders(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(1024, 64), torch.randint(0, 10, (1024,))), batch_size=32)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return nn.functional.cross_entropy(self.model(x), y)

    def on_step_end(self) -> None:
        time.sleep(self.config.pause_s)
        with open(self.config.stamps, "a") as file:
            file.write(f"{time.time()} {self.world.rank} {os.getpid()} {self.global_step} {_began()}\n")


def _began() -> float:
    """Return when this process started, in seconds since 1970; the kernel has it in ticks since boot."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
