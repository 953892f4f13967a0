"""A plan describes a run without starting it: no Ray, no process group, no weights, no files."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headway.orchestrator import Experiment, Scaling, StorageError, plan
from headway.orchestrator.cli.main import main
from headway.trainer import Callback, CheckpointConfig, ConfigError, Duration, ParallelConfig, World
from tests.programs import Program
from tests.tiny import TinyConfig, TinyTrainer


def experiment(tmp_path: Path, *, workers: int = 2, trainer: Any = TinyTrainer, **config: Any) -> Experiment:
    settings = {"max_epochs": 3, "global_batch_size": 16, "micro_batch_size": 4, **config}
    return Experiment(
        name="tiny",
        trainer=trainer,
        config=TinyConfig(**settings),
        scaling=Scaling(workers=workers, cpus_per_worker=0.5),
        storage=str(tmp_path / "runs"),
    )


class Unvalidated(TinyTrainer):
    def configure_dataloaders(self) -> Any:
        return super().configure_dataloaders()[0]


class Counts(Callback):
    def __init__(self) -> None:
        self.evaluations = self.checkpoints = 0

    def on_evaluation_end(self, trainer: Any, metrics: Any) -> None:
        self.evaluations += 1

    def on_checkpoint_saved(self, trainer: Any, checkpoint: Any) -> None:
        self.checkpoints += 1


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max_steps": 11, "evaluate_every": "4 steps", "checkpoint": CheckpointConfig(every=Duration(5))},
        {"max_steps": 6, "precision": "bf16-true", "evaluate_every": None, "checkpoint": CheckpointConfig(every=None)},
        {"max_steps": 6, "evaluate_at_start": True, "checkpoint": CheckpointConfig(every=Duration(2), at_end=False)},
    ],
    ids=str,
)
def test_what_is_planned_is_what_happens(tmp_path: Path, config: dict[str, Any]) -> None:
    found = plan(experiment(tmp_path, workers=1, freeze=("model.first.*",), **config))
    assert not (tmp_path / "runs").exists()
    counts = Counts()
    trainer = TinyTrainer(found.experiment.config, run_dir=tmp_path, world=World.single("cpu"), callbacks=[counts])
    result = trainer.fit()
    assert (found.estimate.total_steps, found.num_evaluations, found.num_checkpoints) == (
        result.steps,
        counts.evaluations,
        counts.checkpoints,
    )
    size = found.estimate.models["model"]
    parameters = list(trainer.model.parameters())
    assert size.parameters == sum(each.numel() for each in parameters)
    assert size.trainable == sum(each.numel() for each in parameters if each.requires_grad)
    assert size.frozen == sum(each.numel() for each in trainer.model.first.parameters())
    state = [value for each in trainer.optimizer.state.values() for value in each.values()]
    assert found.estimate.optimizer_bytes == sum(each.numel() * each.element_size() for each in state)


def test_a_plan_is_read_by_people(tmp_path: Path) -> None:
    text = str(plan(experiment(tmp_path, freeze=("model.first.*",), parallel=ParallelConfig(strategy="fsdp"))))
    for line in (
        f"tiny: new; its files: {tmp_path}/runs/tiny",
        "  workers      2, each with 0.5 CPU",
        "  strategy     fsdp over 2 ranks",
        "  precision    fp32",
        "  model        Deep, 273 parameters, 63 of them frozen, 1.07 KiB, in 2 blocks",
        "  optimizer    AdamW",
        "  batch        16 samples per step: on each of 2 ranks 2 micro-batches of at most 4",
        "  data         96 samples in 6 steps an epoch, 7 left out; resume guarantee: exact",
        "  steps        18, 3 epochs",
        "  evaluation   every 1 epochs, 3 times, over 10 samples in 2 steps",
    ):
        assert line in text.splitlines()
    assert "  checkpoints  every 1 epochs and at the end: 3 of about 2.7" in text
    assert "per rank: weights 546 B + gradients 420 B + optimizer 852 B + gathered" in text


def test_a_batch_of_the_loader_is_a_micro_batch_unless_the_config_has_one(tmp_path: Path) -> None:
    planned = experiment(tmp_path, workers=1, max_steps=1, micro_batch_size=None, batch_size=8)
    assert "  batch        16 samples per step: on each of 1 rank 2 micro-batches of at most 8" in str(plan(planned))
    trainer = TinyTrainer(planned.config, world=World.single("cpu"))
    trainer.fit()
    assert trainer.micro_batches_seen == 2


def test_memory_follows_the_strategy(tmp_path: Path) -> None:
    def memory(**parallel: Any) -> Any:
        return plan(experiment(tmp_path, workers=4, parallel=ParallelConfig(**parallel))).estimate.memory

    whole, sharded = memory(strategy="ddp"), memory(strategy="fsdp", cpu_offload=True)
    groups = memory(strategy="hsdp", dp_shard=2)
    assert (whole.parameters, groups.parameters, sharded.parameters) == (273 * 4, 273 * 2, 273)
    assert (whole.gathered, whole.offloaded, sharded.offloaded) == (0, False, True)
    # Two blocks of 90 numbers, and the first and the last layer.
    assert sharded.gathered == groups.gathered == 4 * (2 * 90 + 63 + 30)
    assert memory(strategy="fsdp", reshard_after_forward=False).gathered == 273 * 4


def test_a_fused_optimizer_takes_what_a_plain_one_takes(tmp_path: Path) -> None:
    class Fused(TinyTrainer):
        def configure_optimizers(self) -> None:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)

    fused, plain = plan(experiment(tmp_path, trainer=Fused)), plan(experiment(tmp_path))
    assert fused.estimate.optimizer_bytes == plain.estimate.optimizer_bytes


def test_an_optimizer_that_wants_values_leaves_its_size_unknown(tmp_path: Path) -> None:
    class Looks(TinyTrainer):
        def configure_optimizers(self) -> None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.model.last.bias.sum().item())

    class Picky(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise TypeError("these are not values")

    class IsPicky(TinyTrainer):
        def configure_optimizers(self) -> None:
            self.optimizer = Picky(self.model.parameters(), lr=0.1)

    for trainer, reason in ((Looks, "configure_optimizers() raises RuntimeError"), (IsPicky, "raises TypeError")):
        found = plan(experiment(tmp_path, trainer=trainer))
        assert (found.estimate.optimizer_bytes, found.storage_bytes) == (None, None)
        assert f"the state of the optimizer, which is unknown ({found.estimate.unknown})" in str(found)
        assert reason in found.estimate.unknown


def test_a_model_with_its_weights_is_planned_and_left_alone(tmp_path: Path) -> None:
    class Has(TinyTrainer):
        def configure_models(self) -> None:
            with torch.device("cpu"):
                super().configure_models()

    trainer = Has(TinyConfig(max_steps=3), world=World.single("cpu"))
    found = trainer.estimate()
    assert found.models["model"].parameters == 273
    assert all(type(each) is nn.Parameter and each.grad is None for each in trainer.model.parameters())
    assert trainer.optimizer.state == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workers": 4096}, "this machine has|the cluster has"),
        ({"freeze": ("model.frist.*",)}, "'model.frist.*' matches no parameter"),
        ({"max_epochs": None}, "the config has no limit"),
        ({"parallel": ParallelConfig(shard_modules=("Block",))}, "names Block, which"),
        ({"num_rows": 5}, "5 rows"),
        ({"trainer": Unvalidated, "evaluate_at_start": True}, "evaluate_at_start needs an evaluation"),
    ],
)
def test_what_fit_refuses_a_plan_refuses(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(experiment(tmp_path, **change))


def test_storage_that_cannot_be_written_is_found_without_writing(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(StorageError, match="runs is not a writable folder"):
        plan(experiment(tmp_path))


LARGE = """
import torch
from torch import nn
from headway.trainer import Trainer, TrainerConfig

class Large(Trainer[TrainerConfig]):
    def configure_models(self):
        self.model = nn.Sequential(*(nn.Linear(100_000, 100_000, bias=False) for _ in range(10)))

    def configure_optimizers(self):
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def configure_dataloaders(self):
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(64, 1)), batch_size=8)
"""


def test_the_command_takes_nothing_and_exits_with_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hundred billion parameters, in a process without Ray, process group or children."""
    (tmp_path / "large.py").write_text(LARGE)
    program = textwrap.dedent("""
        import os, resource, sys
        from headway.orchestrator.cli.main import main
        try:
            main(sys.argv[1:])
        except SystemExit as ended:
            code = ended.code
        import ray, torch
        assert not ray.is_initialized()
        assert not torch.distributed.is_initialized()
        children = open(f"/proc/self/task/{os.getpid()}/children").read() if os.path.exists("/proc") else ""
        assert not children, children
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2**21, "more than 2 GiB"
        sys.exit(code)
    """)
    done = Program(program, "fit", "large.py", "--dry-run", "config.max_steps=100", folder=tmp_path)
    out, err = done.wait()
    assert (done.returncode, err) == (0, "")
    assert "Sequential, 100,000,000,000 parameters, 373 GiB" in out
    assert [each.name for each in tmp_path.iterdir() if each.name != "__pycache__"] == ["large.py"]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as wrong:
        main(["fit", "large.py", "--dry-run", "config.max_stesp=100"])
    assert wrong.value.code == 2
    assert capsys.readouterr() == (
        "",
        "headway: config.max_stesp: TrainerConfig has no field 'max_stesp'; did you mean config.max_steps?\n",
    )
