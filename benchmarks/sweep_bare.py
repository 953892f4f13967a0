"""The baseline of `sweep.py`: the training of `sweep_headway.py` as a plain function for Ray Tune."""

from __future__ import annotations

from typing import Any

import torch
from ray import tune
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train_one_second(config: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["learning_rate"])
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(25600, 64, generator=generator), torch.randint(0, 10, (25600,), generator=generator)
    train = DataLoader(TensorDataset(x, y), batch_size=128, shuffle=True)
    validation = DataLoader(TensorDataset(x[:640], y[:640]), batch_size=128)
    for number, (x, y) in enumerate(train, start=1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if number % 50 == 0:
            model.eval()
            with torch.no_grad():
                losses = [nn.functional.cross_entropy(model(x), y).item() for x, y in validation]
            tune.report({"loss": sum(losses) / len(losses)})
            model.train()


def sweep(trials: int, concurrent: int, folder: str) -> None:
    tuner = tune.Tuner(
        tune.with_resources(train_one_second, {"cpu": 1}),
        param_space={"learning_rate": tune.loguniform(1e-5, 1e-2)},
        # Without reuse, each trial starts a new process, which takes many times as long.
        tune_config=tune.TuneConfig(num_samples=trials, max_concurrent_trials=concurrent, reuse_actors=True),
        run_config=tune.RunConfig(storage_path=folder, verbose=0),
    )
    errors = tuner.fit().num_errors
    if errors:
        raise RuntimeError(f"{errors} trials failed")
