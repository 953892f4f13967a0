"""The experiment that `sweep.py` runs: trials of about a second, with four evaluations and a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway.orchestrator import Experiment, LogUniform, Search
from headway.trainer import Trainer, TrainerConfig


@dataclass(frozen=True, kw_only=True)
class SecondConfig(TrainerConfig):
    learning_rate: float = 1e-3


class Second(Trainer[SecondConfig]):
    def configure_models(self) -> None:
        self.model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.config.learning_rate)

    def configure_dataloaders(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(25600, 64, generator=generator), torch.randint(0, 10, (25600,), generator=generator)
        return (
            DataLoader(TensorDataset(x, y), batch_size=128, shuffle=True),
            DataLoader(TensorDataset(x[:640], y[:640]), batch_size=128),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return nn.functional.cross_entropy(self.model(x), y)


experiment = Experiment(
    name="sweep",
    trainer=Second,
    config=SecondConfig(max_epochs=1, global_batch_size=128, micro_batch_size=128, evaluate_every="50 steps"),
)
search = Search(space={"config.learning_rate": LogUniform(1e-5, 1e-2)}, trials=24, concurrent=2)
