"""Invalid input ends in a Headway error that says what to do, before the first update."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headway.trainer import (
    Callback,
    CheckpointError,
    ConfigError,
    DataError,
    HeadwayError,
    NonFiniteError,
    StepError,
    Trainer,
    TrainerConfig,
    World,
)
from tests.distributed import run_on_ranks
from tests.tiny import Rows, TinyConfig, TinyTrainer

ALONE = World.single("cpu")


class Steps(Callback):
    """Counts updates started and completed."""

    def __init__(self) -> None:
        self.begun = self.completed = 0

    def on_step_start(self, trainer: Trainer[Any]) -> None:
        self.begun += 1

    def on_step_end(self, trainer: Trainer[Any]) -> None:
        self.completed += 1


class Minimal(Trainer[TrainerConfig]):
    """A minimal trainer."""

    def configure_models(self) -> None:
        self.model = nn.Linear(6, 3)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def configure_dataloaders(self) -> Any:
        return torch.utils.data.DataLoader(Rows(16), batch_size=8)  # type: ignore[arg-type]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.model(batch["x"]), batch["y"])


def _lacking(name: str) -> type[Trainer[Any]]:
    return type(
        "Lacking",
        (Trainer,),
        {key: value for key, value in vars(Minimal).items() if key.startswith(("conf", "tr")) and key != name},
    )


def _refused(trainer_class: type[Trainer[Any]], config: TrainerConfig, **options: Any) -> tuple[Exception, Steps]:
    steps = Steps()
    with pytest.raises(Exception) as raised:  # noqa: B017, PT011  # What it is, is looked at by those who ask.
        trainer_class(config, world=ALONE, callbacks=[steps], **options).fit()
    assert steps.completed == 0
    return raised.value, steps


def test_a_minimal_trainer_trains() -> None:
    assert Minimal(TrainerConfig(max_epochs=1), world=ALONE).fit().steps == 2


@pytest.mark.parametrize(
    "method", ["configure_models", "configure_optimizers", "configure_dataloaders", "training_step"]
)
def test_a_trainer_that_lacks_a_method_is_told_which(method: str) -> None:
    error, steps = _refused(_lacking(method), TrainerConfig(max_epochs=1))
    assert isinstance(error, NotImplementedError)
    assert str(error).startswith(f"Lacking must define {method}(self")
    assert steps.begun == (method == "training_step")


@pytest.mark.parametrize(
    ("config", "wanted", "message"),
    [
        (TinyConfig(), ConfigError, "the config has no limit: set max_epochs, max_steps, max_samples or max_tokens"),
        (
            TinyConfig(max_epochs=1, global_batch_size=200),
            DataError,
            "has 103 rows, fewer than one global batch of 200",
        ),
        (TinyConfig(max_epochs=1, batch_size=8, num_rows=0, shuffle=False), DataError, "has no rows"),
    ],
)
def test_a_config_that_cannot_work_is_refused(config: TinyConfig, wanted: type[HeadwayError], message: str) -> None:
    error, steps = _refused(TinyTrainer, config)
    assert isinstance(error, wanted)
    assert message in str(error)
    assert steps.begun == 0


@pytest.mark.parametrize(
    ("step", "wanted"),
    [
        (lambda self, batch, batch_idx: None, StepError),
        (lambda self, batch, batch_idx: {"accuracy": 1.0}, StepError),
        (lambda self, batch, batch_idx: self.model(batch["x"]), StepError),
        (lambda self, batch, batch_idx: self.model(batch["x"]).mean().detach(), StepError),
        (lambda self, batch, batch_idx: self.model(batch["x"]).mean().item(), StepError),
        (lambda self, batch, batch_idx: self.model(batch["x"]).mean() * float("nan"), NonFiniteError),
        (lambda self, batch, batch_idx: self.model(batch["x"]).mean() * float("inf"), NonFiniteError),
        (lambda self, batch, batch_idx: (self.model(batch["x"]) * 0).log().mean(), NonFiniteError),
    ],
)
def test_a_step_that_nothing_can_be_learned_from_changes_nothing(tmp_path: Path, step: Any, wanted: Any) -> None:
    error, steps = _refused(
        type("Wrong", (Minimal,), {"training_step": step}), TrainerConfig(max_epochs=1), run_dir=tmp_path
    )
    assert isinstance(error, wanted)
    assert steps.begun == 1
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.parametrize("resume", ["auto", "never"])
@pytest.mark.parametrize("where", ["a file", "below a file", "no such device", "not permitted", "nobody knows"])
@pytest.mark.filterwarnings("ignore:JsonlTracker")
def test_a_run_directory_that_cannot_be_written_is_refused_before_the_first_step(
    tmp_path: Path, where: str, resume: Any
) -> None:
    (tmp_path / "file").touch()
    closed = tmp_path / "closed"
    closed.mkdir()
    if where == "not permitted":
        if os.geteuid() == 0:
            pytest.skip("nothing is forbidden to root")
        closed.chmod(stat.S_IRUSR | stat.S_IXUSR)
    run_dir = {
        "a file": tmp_path / "file",
        "below a file": tmp_path / "file" / "run",
        "no such device": Path("/proc/no/run"),
        "not permitted": closed / "run",
        "nobody knows": "teleport://bucket/run",
    }[where]
    steps = Steps()
    with pytest.raises((CheckpointError, ConfigError)) as raised:
        TinyTrainer(TinyConfig(max_epochs=1), run_dir=run_dir, world=ALONE, callbacks=[steps]).fit(resume=resume)
    assert steps.begun == 0
    assert str(run_dir).rsplit(":", 1)[-1] in str(raised.value)
    closed.chmod(stat.S_IRWXU)


def _one_rank_cannot_write(world: World, folder: str) -> tuple[str, int]:
    steps = Steps()
    # One relative path for both, as ranks must agree on it, and on the machine of rank 1 a file is in its place.
    os.chdir(f"{folder}/{world.rank}")
    with pytest.raises(CheckpointError) as raised:
        TinyTrainer(TinyConfig(max_epochs=1), run_dir="runs", world=world, trackers=[], callbacks=[steps]).fit()
    return str(raised.value), steps.begun


def test_a_rank_that_cannot_write_ends_all(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "runs").touch()
    for message, begun in run_on_ranks(_one_rank_cannot_write, 2, str(tmp_path)):
        assert "cannot write" in message
        assert "rank 1: NotADirectoryError" in message
        assert begun == 0


def test_all_errors_are_of_one_family_and_of_a_kind_that_python_knows() -> None:
    for error, kind in (
        (ConfigError, ValueError),
        (DataError, ValueError),
        (StepError, TypeError),
        (NonFiniteError, ArithmeticError),
        (CheckpointError, RuntimeError),
    ):
        assert issubclass(error, HeadwayError)
        assert issubclass(error, kind)
