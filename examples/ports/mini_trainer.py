"""mini.trainer's integration example, ported: model, hooks, images, and a config as data.

python examples/ports/mini_trainer.py                                            in this process
torchrun --nproc-per-node 2 examples/ports/mini_trainer.py                       on two ranks
headway fit examples/ports/mini_trainer.py config.model.hidden_size=256          on Ray, with another model
headway fit examples/ports/mini_trainer.py --print-config                        the resolved config as YAML

Running it again resumes the run. docs/coming-from/small-trainers.md maps the names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway.orchestrator import Experiment
from headway.trainer import Callback, CheckpointConfig, Trainer, TrainerConfig, schedules
from headway.trainer.callbacks import Ema, PeakMemory
from headway.trainer.trackers import CsvTracker, ImageFilesTracker


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    batch_size: int = 32
    num_workers: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    hidden_size: int = 128


@dataclass(frozen=True, kw_only=True)
class MyConfig(TrainerConfig):
    learning_rate: float = 3e-3
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)


class MyTrainer(Trainer[MyConfig]):
    def configure_models(self):
        hidden = self.config.model.hidden_size
        self.model = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))

    def configure_optimizers(self):
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.config.learning_rate)
        self.lr_scheduler = schedules.wsd(self.optimizer, total_steps=self.total_steps, warmup_steps=10)

    def configure_dataloaders(self):
        data = load_digits()
        pixels, labels = torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)
        train, held_out = TensorDataset(pixels[300:], labels[300:]), TensorDataset(pixels[:300], labels[:300])
        config = self.config.data
        # Shorter than the run: it is read again in another order.
        loader = DataLoader(train, batch_size=config.batch_size, shuffle=True, num_workers=config.num_workers)
        return loader, DataLoader(held_out, batch_size=100)

    def training_step(self, batch, batch_idx):
        pixels, labels = batch
        logits = self.model(pixels)
        hits = logits.argmax(1) == labels
        # Records may be nested dicts of numbers or tensors; tensors stay on the device until they are logged.
        return {"loss": F.cross_entropy(logits, labels), "top": {"1": hits.float().mean()}}

    def configure_callbacks(self):
        return [Ema(decay=0.98), PeakMemory(), FirstImages(every=100)]

    def configure_trackers(self):
        return [CsvTracker(), ImageFilesTracker(limit=8)]


class FirstImages(Callback):
    """A custom hook that logs the first images of a batch every `every` steps."""

    def __init__(self, every):
        self.every = every

    def on_batch_end(self, trainer, outputs, batch, batch_idx):
        if trainer.global_step % self.every == 0 and not trainer.is_accumulating_gradients:
            pixels, labels = batch
            trainer.log_images(
                {f"digit-{i}-is-{label}": pixels[i].reshape(1, 8, 8) for i, label in enumerate(labels[:8].tolist())}
            )


experiment = Experiment(
    name="mini",
    trainer=MyTrainer,
    config=MyConfig(
        max_steps=300,
        gradient_accumulation_steps=4,
        precision="bf16",
        max_grad_norm=1.0,
        non_finite="retry",
        max_non_finite=3,
        log_every="20 steps",
        evaluate_every="100 steps",
        checkpoint=CheckpointConfig(every="50 steps", keep_last=2, keep_every="100 steps"),
    ),
)

if __name__ == "__main__":
    run_dir = Path("runs/mini-alone")
    trainer = MyTrainer(experiment.config, run_dir=run_dir)
    result = trainer.fit()
    trainer.print(f"{result.status} after {result.steps} steps: {result.reason}")
    trainer.print(f"accuracy {result.metrics['validation/top/1']:.1%} on held-out digits, with averaged weights")
    trainer.print(f"checkpoints: {', '.join(sorted(each.name for each in run_dir.glob('checkpoints/step-*')))}")
