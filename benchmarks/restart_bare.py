"""The baseline of `restart.py`: TorchTrainer, resuming from its last reported checkpoint."""

import os
import sys
import tempfile
import time
from pathlib import Path

import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn


def train(settings: dict[str, str]) -> None:
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(512, 64), torch.randint(0, 10, (512,))
    rank, begin = int(os.environ["RANK"]), 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder, "state.pt"))
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["step"]
    for step in range(begin, int(settings["steps"])):
        start = step % 16 * 32
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[start : start + 32]), y[start : start + 32]).backward()
        optimizer.step()
        time.sleep(float(settings["pause_s"]))
        with open(settings["stamps"], "a") as file:
            file.write(f"{time.time()} {rank} {os.getpid()} {step + 1}\n")
        if (step + 1) % 10 == 0:
            with tempfile.TemporaryDirectory() as folder:
                saved = None
                if rank == 0:
                    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                    torch.save(state, Path(folder, "state.pt"))
                    saved = Checkpoint.from_directory(folder)
                ray.train.report({}, checkpoint=saved)


if __name__ == "__main__":
    stamps, storage, steps, pause_s = sys.argv[1:]
    TorchTrainer(
        train,
        train_loop_config={"stamps": stamps, "steps": steps, "pause_s": pause_s},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="bare", storage_path=storage, failure_config=FailureConfig(max_failures=1)),
    ).fit()
