"""The baseline of `start.py`: TorchTrainer with two workers, without Headway."""

import os
import sys
import time

import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn


def stamp(file: str) -> None:
    with open(file, "a") as opened:
        opened.write(f"{time.time()} ")


def train(settings: dict[str, str]) -> None:
    if os.environ["RANK"] == "0":
        stamp(settings["stamps"])
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(512, 64), torch.randint(0, 10, (512,))
    for start in range(0, 512, 32):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[start : start + 32]), y[start : start + 32]).backward()
        optimizer.step()
        if start == 0 and os.environ["RANK"] == "0":
            stamp(settings["stamps"])


if __name__ == "__main__":
    stamp(sys.argv[1])
    TorchTrainer(
        train,
        train_loop_config={"stamps": sys.argv[1]},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="bare", storage_path=sys.argv[2]),
    ).fit()
