"""A worker computes with what the script has set before the run, although it does not run the script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from headway.orchestrator import Experiment, Retries, fit
from headway.trainer import Trainer, TrainerConfig

SCRIPT = """
import os, sys

os.environ["SET_BY_THE_SCRIPT"] = "7"
import reads_when_imported, torch
from headway.orchestrator import Experiment
from headway.orchestrator.train.worker_group import pickle_trainer
from headway.trainer import Trainer, TrainerConfig


class Reports(Trainer):
    def report(self):
        return {
            "argv": sys.argv[1:], "dtype": str(torch.get_default_dtype()), "variable": os.environ["SET_BY_THE_SCRIPT"],
            "matmul": torch.get_float32_matmul_precision(), "rank": os.environ.get("RANK"),
            "imported": reads_when_imported.VALUE, "deterministic": torch.are_deterministic_algorithms_enabled(),
            "cudnn": torch.backends.cudnn.deterministic,
        }


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    os.environ["RANK"] = "5"
    experiment = Experiment(name="x", trainer=Reports, config=TrainerConfig(max_steps=1))
    open("pickled", "wb").write(pickle_trainer(experiment))
"""

WORKER = """
import json, sys
sys.argv[1:] = ["of", "ray"]
from headway.orchestrator.config.script_settings import unpickle_with_settings

trainer, config = unpickle_with_settings(open("pickled", "rb").read())
print(json.dumps(trainer(config).report()))
"""


def _run(folder: Path, *arguments: str) -> str:
    variables = {name: value for name, value in os.environ.items() if name not in ("RANK", "SET_BY_THE_SCRIPT")}
    paths = os.pathsep.join([str(folder), *filter(None, sys.path)])
    ended = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env={**variables, "PYTHONPATH": paths}, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.extended
def test_a_worker_has_what_the_script_has_set(tmp_path: Path) -> None:
    (tmp_path / "reads_when_imported.py").write_text("import os; VALUE = os.environ['SET_BY_THE_SCRIPT']")
    for name, text in {"script": SCRIPT, "worker": WORKER}.items():
        (tmp_path / f"{name}.py").write_text(text)
    _run(tmp_path, "script.py", "--option", "3")
    found = json.loads(_run(tmp_path, "worker.py"))
    assert found == {
        "argv": ["--option", "3"], "dtype": "torch.float64", "variable": "7", "matmul": "medium", "rank": None,
        "imported": "7", "deterministic": True, "cudnn": True,
    }  # fmt: skip


class Doubles(Trainer[TrainerConfig]):
    def configure_models(self) -> None:
        self.model = nn.Linear(4, 1)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def configure_dataloaders(self) -> Any:
        return DataLoader(torch.ones(8, 4), batch_size=4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("bits", float(torch.finfo(self.model.weight.dtype).bits))
        return self.model(batch).square().mean()


@pytest.mark.usefixtures("ray_session")
def test_workers_on_ray_have_the_default_dtype_of_the_script(tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        experiment = Experiment(
            name="doubles", trainer=Doubles, config=TrainerConfig(max_steps=2), retries=Retries(max_errors=0),
            storage=str(tmp_path),
        )  # fmt: skip
        assert fit(experiment).metrics["train/bits"] == 64
    finally:
        torch.set_default_dtype(torch.float32)
