"""qurious' examples, ported: a model, an optimizer and a loss function without a class, and a class for metrics.

python examples/ports/qurious.py

Running it again resumes the run. docs/coming-from/small-trainers.md maps the names.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway.trainer import CheckpointConfig, SupervisedTrainer, TrainerConfig
from headway.trainer.callbacks import EarlyStopping

# ---- Regression: nothing to subclass -------------------------------------------------------------------------------


def regression():
    random = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 10, generator=random)
    y = x @ torch.randn(10, 1, generator=random) + 0.1 * torch.randn(1000, 1, generator=random)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    trainer = SupervisedTrainer(
        model=model,
        optimizer=optimizer,
        loss_fn=nn.MSELoss(),
        scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2),  # follows the validation loss
        train=DataLoader(TensorDataset(x[:800], y[:800]), batch_size=32, shuffle=True),
        validation=DataLoader(TensorDataset(x[800:], y[800:]), batch_size=200),
        config=TrainerConfig(max_epochs=20, max_grad_norm=1.0),
        run_dir="runs/qurious-regression",
    )
    result = trainer.fit()

    columns = result.history.columns()  # lists by metric, one value per epoch
    print(f"loss from {columns['train/loss'][0]:.2f} to {columns['train/loss'][-1]:.3f}")
    x_new = torch.randn(3, 10)
    trainer.model.eval()
    with torch.no_grad():
        assert trainer.model(x_new).shape == (3, 1)
    return result


# ---- Classification: a subclass for metrics, functions as callbacks, early stopping ----------------------------------


class Classifier(SupervisedTrainer):
    def validation_step(self, batch, batch_idx):
        inputs, targets = batch
        logits = self.model(inputs)
        # Return means over the batch: the evaluation weights them by size, so a smaller last batch counts less.
        return {"loss": F.cross_entropy(logits, targets), "accuracy": (logits.argmax(1) == targets).float().mean()}


def report(trainer, epoch, metrics):
    """Print the epoch. A callback may be a plain function, called after every epoch."""
    trainer.print(f"epoch {epoch}: {metrics['train/loss']:.3f}, accuracy {metrics['validation/accuracy']:.1%}")


def classification():
    data = load_digits()
    pixels, labels = torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    trainer = Classifier(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01),
        loss_fn=F.cross_entropy,
        train=DataLoader(TensorDataset(pixels[300:], labels[300:]), batch_size=32, shuffle=True),
        validation=DataLoader(TensorDataset(pixels[:300], labels[:300]), batch_size=64),
        config=TrainerConfig(
            max_epochs=40,
            checkpoint=CheckpointConfig(monitor="validation/accuracy", mode="max", save_best=True),
        ),
        callbacks=[report, EarlyStopping("validation/accuracy", mode="max", patience=4)],
        run_dir="runs/qurious-classification",
    )
    result = trainer.fit()
    best = trainer.evaluate(checkpoint=result.best_checkpoint)
    print(f"{result.reason}; best after step {result.best_step}: {best['validation/accuracy']:.1%}")
    return result


if __name__ == "__main__":
    for train in (regression, classification):
        result = train()
        print(f"{result.status} after {result.epochs} epochs; {result.last_checkpoint}")
