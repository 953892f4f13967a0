"""When learning rate schedulers move: after updates, after epochs, or after evaluations, which some of them follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..trainer import Trainer

Interval = Literal["step", "epoch", "evaluation"]


def schedulers_at(trainer: Trainer[Any], interval: Interval) -> list[LRScheduler]:
    """Returns the schedulers that move then. One that follows a metric moves after evaluations, whatever was said."""
    return [
        scheduler
        for name, scheduler in trainer.schedulers.items()
        if _setting_for(trainer.scheduler_interval, name, "step") == interval
        and not isinstance(scheduler, ReduceLROnPlateau)
    ]


def step_after_evaluation(trainer: Trainer[Any], metrics: Mapping[str, float]) -> None:
    """Moves the schedulers that move after an evaluation, those that follow a metric by its value.

    Raises:
        ConfigError: there is no such metric.
    """
    for scheduler in schedulers_at(trainer, "evaluation"):
        scheduler.step()
    for name, scheduler in trainer.schedulers.items():
        if isinstance(scheduler, ReduceLROnPlateau):
            monitor = _setting_for(trainer.scheduler_monitor, name, "validation/loss")
            if monitor not in metrics:
                raise ConfigError(f"scheduler_monitor is {monitor!r}, but an evaluation gives {', '.join(metrics)}")
            scheduler.step(metrics[monitor])


def check_intervals(trainer: Trainer[Any]) -> None:
    """Refuses what names no scheduler, or no time at which one could move.

    Raises:
        ConfigError: with what there is.
    """
    for attribute in ("scheduler_interval", "scheduler_monitor"):
        setting = getattr(trainer, attribute)
        if isinstance(setting, Mapping) and (unknown := sorted(setting.keys() - trainer.schedulers.keys())):
            raise ConfigError(
                f"{attribute} names {', '.join(unknown)}; the schedulers are {', '.join(trainer.schedulers) or 'none'}"
            )
    for name in trainer.schedulers:
        interval = _setting_for(trainer.scheduler_interval, name, "step")
        if interval not in get_args(Interval):
            raise ConfigError(f"scheduler_interval is one of {', '.join(get_args(Interval))}, not {interval!r}")


def _setting_for(setting: str | Mapping[str, str], name: str, default: str) -> str:
    return setting.get(name, default) if isinstance(setting, Mapping) else setting
