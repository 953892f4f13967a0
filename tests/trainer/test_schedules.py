"""Learning rates over a run: their curves, their state, and what happens when a run is extended."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from headway.trainer import ConfigError, World, schedules
from tests.tiny import Losses, StopAt, TinyConfig, TinyTrainer


def optimizer_of(*rates: float) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups)


def curve(scheduler: LambdaLR, steps: int) -> list[float]:
    """The learning rate of each update, of the first group."""
    rates = []
    for _ in range(steps):
        rates.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("make", "options", "expected"),
    [
        (schedules.constant, {}, [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        (schedules.constant, {"warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]),
        (schedules.linear, {}, [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0, 0]),
        (
            schedules.linear,
            {"warmup_fraction": 0.2, "minimum": 0.2},
            [0.5, 1, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2],
        ),
        (schedules.cosine, {"warmup_steps": 2}, [0.5, 1, *((1 + math.cos(math.pi * k / 8)) / 2 for k in range(9)), 0]),
        (schedules.wsd, {"warmup_steps": 2, "decay_fraction": 0.4}, [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0]),
        (schedules.wsd, {"decay_fraction": 0.2, "minimum": 0.5}, [1, 1, 1, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.5]),
    ],
)
def test_curves(make: Callable[..., LambdaLR], options: dict[str, Any], expected: list[float]) -> None:
    scheduler = make(optimizer_of(1.0), total_steps=10, **options)
    assert curve(scheduler, len(expected)) == pytest.approx(expected)


def test_every_group_follows_from_its_own_peak() -> None:
    scheduler = schedules.linear(optimizer_of(1.0, 0.1), total_steps=4)
    scheduler.optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([0.75, 0.075])


def test_state_is_saved_and_restored() -> None:
    scheduler = schedules.wsd(optimizer_of(1.0), total_steps=10, warmup_steps=3)
    reference = curve(schedules.wsd(optimizer_of(1.0), total_steps=10, warmup_steps=3), 10)
    assert curve(scheduler, 6) == reference[:6]
    saved = io.BytesIO()
    torch.save([scheduler.optimizer.state_dict(), scheduler.state_dict()], saved)
    saved.seek(0)
    other = schedules.wsd(optimizer_of(1.0), total_steps=10, warmup_steps=3)
    for part, state in zip((other.optimizer, other), torch.load(saved, weights_only=True), strict=True):
        part.load_state_dict(state)
    assert curve(other, 4) == reference[6:]


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (schedules.cosine, {"total_steps": None}, "set max_steps"),
        (schedules.constant, {"total_steps": None, "warmup_fraction": 0.1}, "set max_steps"),
        (schedules.linear, {"total_steps": 10, "warmup_steps": 10}, "must be shorter than total_steps=10"),
        (schedules.linear, {"total_steps": 10, "warmup_steps": 0.1}, "for a fraction use warmup_fraction"),
        (schedules.linear, {"total_steps": 10, "warmup_steps": 1, "warmup_fraction": 0.1}, "not both"),
        (schedules.linear, {"total_steps": 10, "warmup_fraction": 1.5}, "must be >= 0 and < 1"),
        (schedules.linear, {"total_steps": 0}, "integer >= 1"),
        (schedules.linear, {"total_steps": 10, "minimum": 1e-5 - 1}, "fraction of the peak"),
        (
            schedules.wsd,
            {"total_steps": 10, "warmup_steps": 5, "decay_fraction": 0.6},
            "total_steps=10: lower one of them",
        ),
        (schedules.wsd, {"total_steps": 10, "decay_fraction": 0.0}, "must be > 0"),
    ],
)
def test_nonsense_is_refused(make: Callable[..., LambdaLR], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(optimizer_of(1.0), **options)


class Scheduled(TinyTrainer):
    """Over the whole run, or over as many steps as it is told."""

    over: int | None = None

    def configure_optimizers(self) -> None:
        super().configure_optimizers()
        total_steps = self.over or self.total_steps
        self.scheduler = schedules.cosine(self.optimizer, total_steps=total_steps, warmup_steps=2)


def rates_of(run_dir: Path, max_steps: int, *, over: int | None = None, stop: int | None = None) -> dict[int, float]:
    config = TinyConfig(max_steps=max_steps, learning_rate=1.0, log_every="1 steps", evaluate_every=None)  # type: ignore[arg-type]
    losses = Losses()
    callbacks = [losses, *([StopAt(stop)] if stop else [])]
    trainer = Scheduled(config, run_dir=run_dir, world=World.single("cpu"), callbacks=callbacks)
    trainer.over = over
    trainer.fit()
    return losses.of("lr")


def by_hand(step: int, total_steps: int) -> float:
    """The rate that makes update `step`, counted from 1."""
    if step <= 2:
        return step / 2
    return (1 + math.cos(math.pi * min(step - 3, total_steps - 2) / (total_steps - 2))) / 2


def test_the_logged_rate_is_the_one_that_made_the_update(tmp_path: Path) -> None:
    assert rates_of(tmp_path, 10) == pytest.approx({step: by_hand(step, 10) for step in range(1, 11)})


def test_an_extended_run_goes_on_along_the_curve_over_all_its_steps(tmp_path: Path) -> None:
    rates_of(tmp_path, 10)
    with pytest.warns(UserWarning, match=r"over 10 steps and now is over 20.*total_steps=10 to keep the old one"):
        rates = rates_of(tmp_path, 20)
    assert rates == pytest.approx({step: by_hand(step, 20) for step in range(11, 21)})


def test_a_fixed_length_keeps_the_old_curve_when_the_run_is_extended(tmp_path: Path) -> None:
    rates_of(tmp_path, 10)
    assert rates_of(tmp_path, 12, over=10) == pytest.approx({11: 0.0, 12: 0.0}, abs=1e-12)


def test_a_resumed_run_follows_the_same_curve_without_a_word(tmp_path: Path) -> None:
    before = rates_of(tmp_path, 10, stop=4)
    assert {**before, **rates_of(tmp_path, 10)} == pytest.approx({step: by_hand(step, 10) for step in range(1, 11)})
