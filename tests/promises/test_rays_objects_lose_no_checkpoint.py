"""In a TorchTrainer and a Tuner of the user's, a full disk and a second Ctrl-C lose no finished checkpoint."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headway.trainer.checkpoints.store import CheckpointStore
from headway.trainer.distributed.world import World

pytestmark = [pytest.mark.ray, pytest.mark.extended]

PROGRAM = """
import os, resource, sys, time
import ray
import torch
from torch import nn
from headway.orchestrator import Experiment, train_loop, trainable
from headway.trainer import CheckpointConfig, Trainer, TrainerConfig

class Big(Trainer):
    def configure_models(self):
        self.model = nn.Linear(1024, 1024)
    def configure_optimizers(self):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
    def configure_dataloaders(self):
        x = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.DataLoader(x, batch_size=4), torch.utils.data.DataLoader(x[:8], batch_size=4)
    def training_step(self, batch, batch_idx):
        fills = os.environ["ENDS"] == "full"
        if fills and self.global_step == 7:
            # Of each rank's four or two megabytes; records and pointers are smaller.
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        time.sleep(0 if fills else 0.05)
        return self.model(batch).square().mean()

if __name__ == "__main__":
    inside, steps = sys.argv[1], int(sys.argv[2])
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    checkpoint = CheckpointConfig(every="2 steps", keep_last="all")
    config = TrainerConfig(max_steps=steps, global_batch_size=8, evaluate_every="2 steps", checkpoint=checkpoint)
    experiment = Experiment(name="run", trainer=Big, config=config, storage="runs")
    place = os.path.abspath("ray")
    if inside == "TorchTrainer":
        from ray.train import RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer
        workers, run = ScalingConfig(num_workers=2), RunConfig(name="run", storage_path=place)
        print(TorchTrainer(train_loop(experiment), scaling_config=workers, run_config=run).fit().return_value)
    else:
        from ray import tune
        run = tune.RunConfig(name="run", storage_path=place)
        results = tune.Tuner(trainable(experiment, metric="validation/loss"), run_config=run).fit()
        print(results[0].error)
"""


def start(folder: Path, inside: str, ends: str, steps: int) -> subprocess.Popen[str]:
    (folder / "program.py").write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.Popen(
        [sys.executable, "program.py", inside, str(steps)], cwd=folder, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**environment, "PYTHONUNBUFFERED": "1", "ENDS": ends},
    )  # fmt: skip


def finished_steps(folder: Path) -> list[int]:
    # Unlike Path.glob, os.walk passes over folders that are renamed meanwhile.
    found = [Path(parent) for parent, _, files in os.walk(folder / "runs") if "manifest.json" in files]
    return sorted(int(each.name[5:]) for each in found if each.name.startswith("step-"))


@pytest.mark.parametrize("inside", ["TorchTrainer", "Tuner"])
def test_a_full_disk_is_named_and_leaves_the_checkpoints_before_it(tmp_path: Path, inside: str) -> None:
    process = start(tmp_path, inside, "full", 20)
    out, _ = process.communicate(timeout=200)
    (record,) = [json.loads(file.read_text()) for file in tmp_path.glob("runs/**/run.json")]
    assert re.fullmatch(
        r"CheckpointError: cannot save step (6|8) in \S+: (rank \d: )?OSError: \[Errno 27\] File too large.*",
        record["error"],
    ), out
    assert record["error"] in out
    assert record["status"] == "failed"
    assert finished_steps(tmp_path) in ([2, 4], [2, 4, 6])
    assert record["last_checkpoint"].endswith(f"step-{finished_steps(tmp_path)[-1]:08d}")


@pytest.mark.parametrize("inside", ["TorchTrainer", "Tuner"])
def test_after_a_second_ctrl_c_the_run_resumes_from_a_checkpoint_that_was_finished(tmp_path: Path, inside: str) -> None:
    process = start(tmp_path, inside, "interrupted", 1000)
    try:
        deadline = time.monotonic() + 150
        while len(finished_steps(tmp_path)) < 4 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        before = finished_steps(tmp_path)
        for _ in range(2):
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(1)
        out, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    assert len(before) >= 4, out
    # Ray's own words.
    assert re.search("Received SIGINT. Gracefully aborting|Stop signal received|has been interrupted", out), out
    after = finished_steps(tmp_path)
    assert after[: len(before)] == before
    (checkpoints,) = tmp_path.glob("runs/**/checkpoints")
    newest = CheckpointStore(str(checkpoints), world=World.attach("cpu")).newest_good()
    assert newest is not None
    assert newest.step == after[-1]
    if inside == "TorchTrainer":
        out, _ = start(tmp_path, inside, "interrupted", after[-1] + 4).communicate(timeout=200)
        assert "'status': 'completed'" in out
        assert finished_steps(tmp_path)[-1] == after[-1] + 4
        assert f'"step": {after[-1]}' in next(tmp_path.glob("runs/**/events.jsonl")).read_text()
