"""The program that `goodput.py` runs with `headway fit`: a small model with updates as long as those of a large one."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway.trainer import Trainer, TrainerConfig


@dataclass(frozen=True, kw_only=True)
class GoodputConfig(TrainerConfig):
    step_s: float


class Goodput(Trainer[GoodputConfig]):
    def configure_models(self) -> None:
        self.model = nn.Sequential(
            nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
        )

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def configure_dataloaders(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,))), batch_size=32)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        # Sleep, as if a GPU computed: the CPU cores stay free for what is measured.
        time.sleep(self.config.step_s)
        return nn.functional.cross_entropy(self.model(x), y)
