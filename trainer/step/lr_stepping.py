"""When learning rate schedulers step: after updates, after epochs, or after evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..errors import ConfigError

Interval = Literal["step", "epoch", "evaluation"]


class LrStepping:
    """The schedulers of a run, and when each of them steps.

    Attributes:
        schedulers: by the names of the attributes that hold them.
    """

    def __init__(self) -> None:
        self.schedulers: dict[str, LRScheduler] = {}
        self._interval: Interval | Mapping[str, Interval] = "step"
        self._monitor: str | Mapping[str, str] = "validation/loss"

    def use(
        self,
        schedulers: Mapping[str, LRScheduler],
        *,
        interval: Interval | Mapping[str, Interval],
        monitor: str | Mapping[str, str],
    ) -> None:
        """Takes the schedulers that `configure_optimizers` has made.

        Args:
            schedulers: by name.
            interval: when they step, or a dict of that by name; "step" where it names none.
            monitor: the metric of a `ReduceLROnPlateau`, or a dict of that by name.

        Raises:
            ConfigError: a setting names no scheduler, or an interval that does not exist.
        """
        for field, setting in (("scheduler_interval", interval), ("scheduler_monitor", monitor)):
            if isinstance(setting, Mapping) and (unknown := sorted(setting.keys() - schedulers.keys())):
                raise ConfigError(
                    f"{field} names {', '.join(unknown)}; the schedulers are {', '.join(schedulers) or 'none'}"
                )
        for name in schedulers:
            if (chosen := _setting_for(interval, name, "step")) not in get_args(Interval):
                raise ConfigError(f"scheduler_interval must be one of {', '.join(get_args(Interval))}, not {chosen!r}")
        self.schedulers.clear()
        self.schedulers.update(schedulers)
        self._interval, self._monitor = interval, monitor

    def at(self, interval: Interval) -> list[LRScheduler]:
        """Returns the schedulers that step then; a `ReduceLROnPlateau` always follows evaluations and is never here."""
        return [
            scheduler
            for name, scheduler in self.schedulers.items()
            if _setting_for(self._interval, name, "step") == interval and not isinstance(scheduler, ReduceLROnPlateau)
        ]

    def step_after_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Steps the schedulers that follow evaluations, a `ReduceLROnPlateau` by the value of its metric.

        Raises:
            ConfigError: there is no such metric.
        """
        for scheduler in self.at("evaluation"):
            scheduler.step()
        for name, scheduler in self.schedulers.items():
            if isinstance(scheduler, ReduceLROnPlateau):
                monitor = _setting_for(self._monitor, name, "validation/loss")
                if monitor not in metrics:
                    raise ConfigError(f"scheduler_monitor is {monitor!r}, but an evaluation gives {', '.join(metrics)}")
                scheduler.step(metrics[monitor])


def _setting_for(setting: str | Mapping[str, str], name: str, default: str) -> str:
    return setting.get(name, default) if isinstance(setting, Mapping) else setting
