"""Invalid input ends in a Headway error that says what to do, before the first update."""

from __future__ import annotations

import os
import socket
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
from headway.trainer.errors import RunConflictError
from headway.trainer.ownership import run_dir
from headway.trainer.ownership.claim import acquire
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
@pytest.mark.parametrize("where", ["a file", "below a file", "no such device", "not permitted", "unknown protocol"])
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
        "unknown protocol": "teleport://bucket/run",
    }[where]
    steps = Steps()
    with pytest.raises((CheckpointError, ConfigError)) as raised:
        TinyTrainer(TinyConfig(max_epochs=1), run_dir=run_dir, world=ALONE, callbacks=[steps]).fit(resume=resume)
    assert steps.begun == 0
    assert str(run_dir).rsplit(":", 1)[-1] in str(raised.value)
    closed.chmod(stat.S_IRWXU)


class Setups(Steps):
    """Also counts how often the setup of models and data began."""

    def on_setup_start(self, trainer: Any) -> None:
        self.begun += 1


def _ranks_with_folders_of_their_own(world: World, folder: str) -> tuple[str, int]:
    setups = Setups()
    # Instead of waiting for a network file system.
    run_dir._VISIBLE_WITHIN_S = 0.1
    # One relative path for both, as ranks must agree on it, in two places.
    os.chdir(f"{folder}/{world.rank}")
    with pytest.raises(ConfigError) as raised:
        TinyTrainer(TinyConfig(max_epochs=1), run_dir="runs", world=world, callbacks=[setups]).fit()
    assert type(raised.value) is ConfigError
    return str(raised.value), setups.begun


@pytest.mark.parametrize("of_rank_1", ["nothing", "a file", "a folder"])
def test_ranks_that_do_not_share_their_folder_are_refused_at_the_start(tmp_path: Path, of_rank_1: str) -> None:
    """Not at the first commit, when an epoch has been trained for nothing."""
    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    if of_rank_1 == "a file":
        (tmp_path / "1" / "runs").touch()
    elif of_rank_1 == "a folder":
        acquire(str(tmp_path / "1" / "runs")).release()
    problem = "the folder is another one" if of_rank_1 == "a folder" else "there is no such folder, or it is empty"
    host = socket.gethostname()
    for message, begun in run_on_ranks(_ranks_with_folders_of_their_own, 2, str(tmp_path)):
        assert f"do not see in runs what rank 0 on {host} has written there:\n  rank 1 on {host}: {problem}" in message
        assert "run_dir='s3://...'" in message
        assert begun == 0
    assert acquire(str(tmp_path / "0" / "runs")).problem() is None, "the claim of the refused run is released"


def _refused_by_another(world: World, folder: str) -> tuple[str, int]:
    setups = Setups()
    with pytest.raises(RunConflictError) as raised:
        TinyTrainer(TinyConfig(max_epochs=1), run_dir=folder, world=world, callbacks=[setups]).fit()
    return str(raised.value), setups.begun


def test_all_ranks_are_refused_at_the_folder_of_a_live_run(tmp_path: Path) -> None:
    with acquire(str(tmp_path)) as owner:
        for message, begun in run_on_ranks(_refused_by_another, 2, str(tmp_path)):
            assert f"process {os.getpid()} on {socket.gethostname()} is training in {tmp_path}" in message
            assert begun == 0
        assert owner.problem() is None


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
