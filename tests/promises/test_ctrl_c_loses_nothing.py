"""Ctrl-C at `headway fit` ends the run within seconds with a checkpoint, and the next start resumes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headway.orchestrator import Run, fit, resolve
from headway.orchestrator.storage.events import read_events
from headway.trainer.trackers.jsonl import read_records

pytestmark = [pytest.mark.ray, pytest.mark.slow]

TARGET = """
import time
from dataclasses import dataclass
import torch
from torch import nn
from headway.trainer import Duration, Trainer, TrainerConfig

@dataclass(frozen=True, kw_only=True)
class LineConfig(TrainerConfig):
    pause_s: float = 0.02

class Line(Trainer[LineConfig]):
    def configure_models(self):
        self.model = nn.Linear(4, 1)
    def configure_optimizers(self):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
    def configure_dataloaders(self):
        x = torch.randn(4096, 4, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
    def training_step(self, batch, batch_idx):
        # The next start does not have to be interrupted.
        time.sleep(self.config.pause_s if self.attempt == 1 else 0.002)
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])
"""


def wait_for_step(step: int, run_dir: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline and process.poll() is None:
        if any(record["step"] >= step for record in read_records(run_dir / "metrics.jsonl")):
            return
        time.sleep(0.05)
    raise AssertionError(f"the run did not get to step {step}")


def test_ctrl_c_saves_and_the_next_start_goes_on(tmp_path: Path, ray_session: None) -> None:
    (tmp_path / "line.py").write_text(TARGET)
    overrides = ["config.max_steps=400", "config.log_every=5", "scaling.workers=2", f"storage={tmp_path}/runs"]
    # A terminal sends Ctrl-C to the whole process group: the driver and the Ray that it started.
    process = subprocess.Popen(
        [sys.executable, "-m", "headway.orchestrator", "fit", "line.py", *overrides],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path, start_new_session=True,
        env={**{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    run_dir = tmp_path / "runs/line"
    try:
        wait_for_step(20, run_dir, process)
        os.killpg(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 130, out
    run = Run(str(run_dir))
    assert (run.status, run.record.attempts) == ("interrupted", 1)
    steps = run.record.steps
    assert 20 <= steps < 400
    assert str(run.record.last_checkpoint).endswith(f"step-{steps:08d}")
    assert "to resume, start it again" in out
    assert "Traceback" not in out
    # The output shows the run and nothing of Ray.
    assert not re.search(r"raylet|ray::|RayTrainWorker|placement group|WARNING|INFO ", out), out

    result = fit(resolve(str(tmp_path / "line.py"), overrides))
    assert (result.status, result.steps, result.attempts) == ("completed", 400, 2)
    assert result.resumed_from == run.record.last_checkpoint
    restored = [event["step"] for event in read_events(run.folder) if event["event"] == "restored"]
    assert restored == [steps]
