"""Train a classifier of handwritten digits: the smallest complete Headway program.

python examples/digits.py                                  in this process
torchrun --nproc-per-node 2 examples/digits.py             on two ranks
headway fit examples/digits.py scaling.workers=2           on two Ray workers, which are replaced if they die
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway.trainer import Trainer, TrainerConfig


@dataclass(frozen=True, kw_only=True)
class DigitsConfig(TrainerConfig):
    learning_rate: float = 3e-3
    hidden_size: int = 64


class Digits(Trainer[DigitsConfig]):
    def configure_models(self):
        hidden = self.config.hidden_size
        self.model = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, 10))

    def configure_optimizers(self):
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.config.learning_rate)

    def configure_dataloaders(self):
        digits = load_digits()
        pixels, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
        train = TensorDataset(pixels[300:], labels[300:])
        held_out = TensorDataset(pixels[:300], labels[:300])
        return DataLoader(train, batch_size=32, shuffle=True), DataLoader(held_out, batch_size=100)

    def training_step(self, batch, batch_idx):
        pixels, labels = batch
        logits = self.model(pixels)
        return {"loss": F.cross_entropy(logits, labels), "accuracy": (logits.argmax(1) == labels).float().mean()}


config = DigitsConfig(max_epochs=5, global_batch_size=64, micro_batch_size=32, seed=1)

if __name__ == "__main__":
    result = Digits(config, run_dir="runs/digits-alone").fit()
    accuracy = result.metrics["validation/accuracy"]
    print(f"{result.status}: accuracy {accuracy:.1%} on held-out digits; {result.last_checkpoint}")
