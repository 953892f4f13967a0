"""A dry run with a step finds on the CPU what would otherwise show on the workers, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headway.orchestrator import Experiment, Scaling, plan
from headway.trainer import Callback, LossSpikeConfig, ParallelConfig, StepError
from tests.programs import Program
from tests.tiny import TinyConfig, TinyTrainer


def experiment(tmp_path: Path, trainer: Any = TinyTrainer, *, workers: int = 2, **config: Any) -> Experiment:
    return Experiment(
        name="tiny",
        trainer=trainer,
        config=TinyConfig(**{"max_epochs": 3, "global_batch_size": 16, "micro_batch_size": 4, **config}),
        scaling=Scaling(workers=workers, cpus_per_worker=0.5),
        storage=str(tmp_path / "runs"),
    )


class Sees(TinyTrainer):
    """Stores what its steps see, over all its instances."""

    batches: list[tuple[bool, list[int]]] = []
    weights: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        Sees.batches.append((self.training, batch["id"].tolist()))
        Sees.weights.append(self.model.last.weight.detach().clone())
        return super().training_step(batch, batch_idx)


class Writes(Callback):
    def on_step_end(self, trainer: Any) -> None:
        Path(trainer.run_dir, "step.txt").write_text("made")


def test_it_makes_one_update_and_one_evaluation_with_real_data(tmp_path: Path) -> None:
    Sees.batches.clear()
    Sees.weights.clear()
    before = list(tmp_path.iterdir())
    found = plan(experiment(tmp_path, Sees), step=True)
    (trained, rows), (evaluated, held_out) = Sees.batches
    # The first micro-batch of rank 0, and the first batch of the validation data.
    assert (trained, len(rows), evaluated, held_out) == (True, 4, False, [0, 1, 2])
    assert not torch.equal(*Sees.weights)
    assert found.step is not None
    assert {"train/loss", "validation/loss"} <= found.step.keys()
    assert f"  step         made and evaluated on the CPU: train/loss {found.step['train/loss']:.4g}" in str(found)
    assert plan(experiment(tmp_path)).step is None
    assert list(tmp_path.iterdir()) == before


def test_it_makes_what_a_cpu_can_of_any_config(tmp_path: Path) -> None:
    class Logs(TinyTrainer):
        def configure_callbacks(self) -> Any:
            return [Writes()]

        def configure_trackers(self) -> Any:
            raise AssertionError("no tracker is wanted")

    for config in (
        {"float8": True, "precision": "bf16", "parallel": ParallelConfig(strategy="fsdp", compile=True)},
        {"precision": "fp16", "loss_spike": LossSpikeConfig(), "max_grad_norm": 1.0},
        {"parallel": ParallelConfig(strategy="hsdp", dp_shard=2, activation_checkpointing="full")},
        {"exact": True, "num_workers": 1, "halve_on_out_of_memory": False},
        {"global_batch_size": None, "micro_batch_size": None, "gradient_accumulation_steps": 3},
    ):
        found = TinyTrainer if config.get("float8") else Logs
        metrics = found(experiment(tmp_path, **config).config).check_step(ranks=2)
        assert 0.5 < metrics["train/loss"] < 2.5
    assert not list(tmp_path.iterdir())


WRONG = """
import torch
from torch import nn
from headway.trainer import Trainer, TrainerConfig

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(17, 1)

    def forward(self, x):
        hidden = self.first(x).relu()
        return self.last(hidden)

class Wrong(Trainer[TrainerConfig]):
    def configure_models(self):
        self.model = Net()

    def configure_optimizers(self):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def configure_dataloaders(self):
        data = torch.utils.data.TensorDataset(torch.zeros(64, 8))
        return torch.utils.data.DataLoader(data, batch_size=8)

    def training_step(self, batch, batch_idx):
        return self.model(batch[0]).mean()
"""


def test_a_wrong_shape_is_one_short_message_with_the_users_lines(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    program = "import sys; from headway.orchestrator.cli.main import main; main(sys.argv[1:])"
    command = [program, "fit", "wrong.py", "config.max_steps=3"]
    done = Program(*command, "--dry-run", "--step", folder=tmp_path)
    out, err = done.wait()
    assert (done.returncode, out) == (1, "")
    assert err.splitlines() == [
        "headway: one step on the CPU fails with RuntimeError: mat1 and mat2 shapes cannot be multiplied "
        "(8x16 and 17x1)",
        "  wrong.py:27, in training_step: return self.model(batch[0]).mean()",
        "  wrong.py:13, in forward: return self.last(hidden)",
    ]
    assert [each.name for each in tmp_path.iterdir() if each.name != "__pycache__"] == ["wrong.py"]
    alone = Program(*command, "--step", folder=tmp_path)
    assert "--step needs --dry-run" in alone.wait()[1]
    assert alone.returncode == 2


class BadRows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, row: int) -> Any:
        return torch.zeros(3) + torch.zeros(4)


def test_an_error_in_a_worker_process_of_the_loader_keeps_its_cause(tmp_path: Path) -> None:
    class Reads(TinyTrainer):
        def configure_dataloaders(self) -> Any:
            return torch.utils.data.DataLoader(BadRows(), batch_size=8, num_workers=1)

    with pytest.raises(StepError) as raised:
        plan(experiment(tmp_path, Reads), step=True)
    lines = str(raised.value).splitlines()
    assert lines[0].startswith("one step on the CPU fails with RuntimeError: Caught RuntimeError in DataLoader worker")
    assert "RuntimeError: The size of tensor a (3) must match the size of tensor b (4)" in str(raised.value)
    assert any("return torch.zeros(3) + torch.zeros(4)" in line for line in lines)
    assert len(lines) < 14


def test_errors_of_headway_and_of_the_evaluation_are_found(tmp_path: Path) -> None:
    class NoLoss(TinyTrainer):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"accuracy": 1.0}

    class BadEvaluation(TinyTrainer):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": batch["label"]}

    with pytest.raises(StepError, match="loss"):
        plan(experiment(tmp_path, NoLoss), step=True)
    with pytest.raises(StepError, match=r"KeyError: 'label'\n.*in validation_step: return \{\"loss\": batch"):
        plan(experiment(tmp_path, BadEvaluation), step=True)
