"""A changed learning rate that a resumed run accepts is in force, and the run says so."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from headway.trainer import CheckpointError, World
from tests.tiny import TinyConfig, TinyTrainer

ALONE = World.single("cpu")


@dataclass(frozen=True, kw_only=True)
class Config(TinyConfig):
    weight_decay: float = 0.01
    schedule: str = "none"
    period: int = 20


class Scheduled(TinyTrainer):
    def configure_optimizers(self) -> None:
        config: Any = self.config
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
        )
        if config.schedule == "cosine":
            self.scheduler = lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=config.period)
        if config.schedule == "warmup":
            warmup = lr_scheduler.LinearLR(self.optimizer, 0.5, total_iters=2)
            decay = lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=config.period)
            self.scheduler = lr_scheduler.SequentialLR(self.optimizer, [warmup, decay], milestones=[2])


def _run(folder: Path, *, accept: bool = False, **config: Any) -> tuple[list[float], list[str]]:
    """Train, and return the learning rates of the updates and what the run said."""
    said: list[str] = []
    rates: list[float] = []

    class Notes(Scheduled):
        def on_step_end(self) -> None:
            rates.append(self.optimizer.param_groups[0]["lr"])

    trainer = Notes(Config(log_every=1, **config), run_dir=folder, world=ALONE, printer=said.append)
    trainer.fit(accept_changes=accept)
    return rates, [line for line in said if line.startswith("configure_optimizers()")]


def test_an_accepted_learning_rate_is_in_force_and_said(tmp_path: Path) -> None:
    _run(tmp_path, max_steps=4, learning_rate=0.01)
    rates, said = _run(tmp_path, max_steps=6, learning_rate=0.001, weight_decay=0.5, accept=True)
    assert rates == [0.001, 0.001]
    assert said == [
        "configure_optimizers() has changed; optimizer.lr: 0.01 -> 0.001 is in force; "
        "optimizer.weight_decay: 0.01 -> 0.5 is in force"
    ]
    # It stays so, and is said once.
    assert _run(tmp_path, max_steps=8, learning_rate=0.001, weight_decay=0.5) == ([0.001, 0.001], [])


@pytest.mark.parametrize("schedule", ["cosine", "warmup"])
def test_a_scheduled_rate_goes_on_in_proportion(tmp_path: Path, schedule: str) -> None:
    whole, _ = _run(tmp_path / "whole", max_steps=10, learning_rate=0.01, schedule=schedule)
    _run(tmp_path / "cut", max_steps=5, learning_rate=0.01, schedule=schedule)
    rates, said = _run(tmp_path / "cut", max_steps=10, learning_rate=0.002, schedule=schedule, accept=True)
    assert rates == pytest.approx([rate / 5 for rate in whole[5:]])
    assert "optimizer.lr: " in said[0]
    assert "is in force, from" in said[0]
    assert "not in force" not in said[0]


def test_a_setting_of_a_schedule_is_in_force(tmp_path: Path) -> None:
    _run(tmp_path, max_steps=5, learning_rate=0.01, schedule="cosine", period=5)
    rates, said = _run(tmp_path, max_steps=8, learning_rate=0.01, schedule="cosine", period=500, accept=True)
    assert "scheduler.T_max: 5 -> 500 is in force" in said[0]
    assert len(rates) == 3


def test_a_change_of_the_code_alone_is_said_and_not_in_force(tmp_path: Path) -> None:
    _run(tmp_path, max_steps=4, learning_rate=0.01)
    original = Config.learning_rate

    class Edited(Scheduled):
        def configure_optimizers(self) -> None:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.5)

    said: list[str] = []
    trainer = Edited(
        Config(log_every=1, max_steps=5, learning_rate=original), run_dir=tmp_path, world=ALONE, printer=said.append
    )
    with pytest.warns(UserWarning, match=r"the code of configure_optimizers\(\)"):
        trainer.fit()
    assert trainer.optimizer.param_groups[0]["lr"] == 0.01
    assert said == [
        "configure_optimizers() has changed; optimizer.lr: 0.01 -> 0.5 is not in force: accept_changes=True puts it in "
        "force"
    ]


def test_another_optimizer_is_refused_by_its_class(tmp_path: Path) -> None:
    _run(tmp_path, max_steps=2)

    class Sgd(Scheduled):
        def configure_optimizers(self) -> None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    trainer = Sgd(Config(max_steps=4), run_dir=tmp_path, world=ALONE)
    with (
        pytest.warns(UserWarning, match="the code of configure_optimizers"),
        pytest.raises(
            CheckpointError, match=r"'optimizer' is an SGD, but the checkpoint has the state of an AdamW: set"
        ),
    ):
        trainer.fit()
