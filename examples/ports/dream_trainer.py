"""Dream Trainer's two examples, ported: a classifier with a manual backward, and a GAN with two optimizers.

python examples/ports/dream_trainer.py                                       the classifier
python examples/ports/dream_trainer.py gan                                   the GAN
torchrun --nproc-per-node 2 examples/ports/dream_trainer.py                  on two ranks
headway fit examples/ports/dream_trainer.py:gan config.max_steps=2000        on Ray, longer

Running one again resumes the run. docs/coming-from/small-trainers.md maps the names.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassF1Score, MulticlassPrecision, MulticlassRecall

from headway.orchestrator import Experiment
from headway.trainer import Callback, Trainer, TrainerConfig, schedules

# ---- The classifier of their reference -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig(TrainerConfig):
    learning_rate: float = 3e-3
    hidden_size: int = 128


class Classifier(Trainer[ClassifierConfig]):
    def configure_models(self):
        hidden = self.config.hidden_size
        self.model = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))

    def init_weights(self):
        for module in self.model.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def configure_optimizers(self):
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=self.config.learning_rate)
        self.scheduler = schedules.cosine(self.optimizer, total_steps=self.total_steps, warmup_fraction=0.1)

    def configure_dataloaders(self):
        pixels, labels = digits()
        train, held_out = TensorDataset(pixels[300:], labels[300:]), TensorDataset(pixels[:300], labels[:300])
        return DataLoader(train, batch_size=32, shuffle=True), DataLoader(held_out, batch_size=100)

    def configure_metrics(self):
        return {
            "f1": MulticlassF1Score(10),
            "precision": MulticlassPrecision(10),
            "recall": MulticlassRecall(10),
        }

    def training_step(self, batch, batch_idx):
        pixels, labels = batch
        logits = self.model(pixels)
        loss = F.cross_entropy(logits, labels)
        self.backward(loss)  # weights the loss by this micro-batch's share of the update
        self.step(self.optimizer)  # at the last micro-batch; the loop calls both if a step does not
        return {"loss": loss, "accuracy": (logits.argmax(1) == labels).float().mean()}

    def validation_step(self, batch, batch_idx):
        pixels, labels = batch
        logits = self.model(pixels)
        for metric in self.metrics.values():
            metric.update(logits, labels)
        return {"loss": F.cross_entropy(logits, labels), "accuracy": (logits.argmax(1) == labels).float().mean()}


def digits():
    """Return 8 x 8 images of handwritten digits as rows of 64 values from 0 to 1, and their labels."""
    data = load_digits()
    return torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)


classifier = Experiment(
    name="dream-classifier",
    trainer=Classifier,
    config=ClassifierConfig(
        max_epochs=10,
        gradient_accumulation_steps=4,
        max_grad_norm=1.0,
        precision="bf16",
        log_every="10 steps",
        seed=42,
    ),
)

# ---- The GAN of their guide ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GanConfig(TrainerConfig):
    g_lr: float = 2e-3
    d_lr: float = 2e-3
    noise_size: int = 8


class Gan(Trainer[GanConfig]):
    """Learns to generate points around a circle; the discriminator separates them from real ones."""

    def configure_models(self):
        self.generator = mlp(self.config.noise_size, 2)
        self.discriminator = mlp(2, 1)

    def configure_optimizers(self):
        self.g_optimizer = torch.optim.Adam(self.generator.parameters(), lr=self.config.g_lr, betas=(0.5, 0.99))
        self.d_optimizer = torch.optim.Adam(self.discriminator.parameters(), lr=self.config.d_lr, betas=(0.5, 0.99))

    def configure_dataloaders(self):
        points = circle(25_600, torch.Generator().manual_seed(self.config.seed))
        return DataLoader(points, batch_size=256, shuffle=True), DataLoader(points[:512], batch_size=256)

    def training_step(self, real, batch_idx):
        fake = self.draw(len(real))
        d_loss = (F.softplus(-self.discriminator(real)) + F.softplus(self.discriminator(fake.detach()))).mean()
        self.backward(d_loss)
        self.step(self.d_optimizer)

        g_loss = F.softplus(-self.discriminator(fake)).mean()
        self.backward(g_loss)
        self.step(self.g_optimizer)
        return {"g_loss": g_loss, "d_loss": d_loss}

    def validation_step(self, real, batch_idx):
        return {"off_circle": (self.draw(len(real)).norm(dim=1) - 1).abs().mean()}

    def draw(self, number):
        return self.generator(torch.randn(number, self.config.noise_size, device=self.device))


class BatchesSeen(Callback):
    """Counts micro-batches; `on_batch_end` is their `on_train_batch_end`."""

    def __init__(self):
        self.seen = 0

    def on_batch_end(self, trainer, outputs, batch, batch_idx):
        self.seen += 1

    def on_fit_end(self, trainer, error):
        trainer.print(f"{self.seen} batches in this attempt, {trainer.micro_batches_seen} in total")


def mlp(inputs, outputs, width=64):
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, outputs),
    )


def circle(number, generator):
    angles = 2 * torch.pi * torch.rand(number, generator=generator)
    return torch.stack((angles.cos(), angles.sin()), dim=1) + 0.05 * torch.randn(number, 2, generator=generator)


gan = Experiment(
    name="dream-gan",
    trainer=Gan,
    config=GanConfig(max_steps=400, log_every="50 steps", evaluate_every="100 steps", seed=1),
)

if __name__ == "__main__":
    chosen = gan if "gan" in sys.argv[1:] else classifier
    trainer = chosen.trainer(chosen.config, run_dir=f"runs/{chosen.name}-alone", callbacks=[BatchesSeen()])
    result = trainer.fit()
    trainer.print(f"{result.status} after {result.steps} steps: {result.reason}")
    trainer.print(", ".join(f"{name} {value:.3f}" for name, value in trainer.evaluate().items()))
