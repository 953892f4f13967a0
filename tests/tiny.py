"""A small model over numbered rows, with everything that a resume can get wrong: dropout, shuffle, augmentation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from headway.trainer import Callback, Trainer, TrainerConfig


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Row i is a fixed random vector with a fixed label; with `noise`, each read augments it."""

    def __init__(self, num_rows: int, *, noise: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(num_rows, 6, generator=generator)
        self.y = torch.randint(0, 3, (num_rows,), generator=generator)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        x = self.x[row]
        if self.noise:
            x = x + self.noise * torch.randn(x.shape)
        return {"id": torch.tensor(row), "x": x, "y": self.y[row]}


class Deep(nn.Module):
    """Two blocks, which sharding, checkpointing and compiling handle one at a time."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(6, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(2))
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(self.dropout(x))


@dataclass(frozen=True, kw_only=True)
class TinyConfig(TrainerConfig):
    num_rows: int = 103
    batch_size: int = 8
    drop_last: bool = True
    shuffle: bool = True
    noise: float = 0.0
    dropout: float = 0.0
    width: int = 9
    learning_rate: float = 0.01
    num_workers: int = 0


class TinyTrainer(Trainer[TinyConfig]):
    """Stores the row ids of every update."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[tuple[int, list[int]]] = []

    def configure_models(self) -> None:
        self.model = Deep(self.config.width, self.config.dropout)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.config.learning_rate)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=100)

    def configure_dataloaders(self) -> Any:
        config = self.config
        train = DataLoader(
            Rows(config.num_rows, noise=config.noise),
            batch_size=config.batch_size,
            shuffle=config.shuffle,
            drop_last=config.drop_last,
            num_workers=config.num_workers,
        )
        return train, DataLoader(Rows(10), batch_size=3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.training:
            self.seen.append((self.global_step, batch["id"].tolist()))
        logits = self.model(batch["x"])
        return {
            "loss": F.cross_entropy(logits, batch["y"]),
            "accuracy": (logits.argmax(1) == batch["y"]).float().mean(),
        }


class StopAt(Callback):
    """Requests a stop after an update."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Trainer[Any]) -> None:
        if trainer.global_step == self.step:
            trainer.request_stop(f"step {self.step}", status="interrupted")


class Losses(Callback):
    """Stores every record of the log."""

    def __init__(self) -> None:
        self.records: dict[int, dict[str, float]] = {}

    def on_log(self, trainer: Trainer[Any], metrics: Any) -> None:
        self.records.setdefault(trainer.global_step, {}).update(metrics)

    def of(self, name: str) -> dict[int, float]:
        return {step: record[name] for step, record in self.records.items() if name in record}


def weights(trainer: Trainer[Any]) -> dict[str, torch.Tensor]:
    """Return the full weights of a trainer's models, on every rank."""
    from headway.trainer.distributed.dtensor import to_full_tensor

    return {
        f"{name}.{path.removeprefix('module.')}": to_full_tensor(value.detach()).clone()
        for name, model in trainer.models.items()
        for path, value in model.state_dict().items()
    }
