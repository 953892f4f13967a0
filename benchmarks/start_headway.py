"""The program that `start.py` runs with `headway fit`: the same training as `start_bare.py`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway.trainer import Trainer, TrainerConfig


@dataclass(frozen=True, kw_only=True)
class StartConfig(TrainerConfig):
    stamp: str


class Start(Trainer[StartConfig]):
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
        if self.global_step == 1 and self.world.is_main:
            Path(self.config.stamp).write_text(str(time.time()))
