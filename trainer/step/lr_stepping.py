"""When learning rate schedulers step: after updates, after epochs, or after evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..errors import ConfigError, StepError

Interval = Literal["step", "epoch", "evaluation"]


class LrStepping:
    """The schedulers of a run, and when each steps.

    Attributes:
        schedulers: by the names of the attributes that hold them.
    """

    def __init__(self) -> None:
        self.schedulers: dict[str, LRScheduler] = {}
        self._interval: Interval | Mapping[str, Interval] = "step"
        self._monitor: str | Mapping[str, str] = "validation/loss"
        self._last_epochs: dict[LRScheduler, int] = {}

    def use(
        self,
        schedulers: Mapping[str, LRScheduler],
        *,
        interval: Interval | Mapping[str, Interval],
        monitor: str | Mapping[str, str],
    ) -> None:
        """Set the schedulers.

        Args:
            schedulers: by name.
            interval: when they step, or a dict of intervals by scheduler name; "step" for schedulers that it omits.
            monitor: the metric for `ReduceLROnPlateau`, or a dict of metrics by scheduler name.

        Raises:
            ConfigError: a setting names an unknown scheduler or interval.
        """
        for field, setting in (("scheduler_interval", interval), ("scheduler_monitor", monitor)):
            if isinstance(setting, Mapping) and (unknown := sorted(setting.keys() - schedulers.keys())):
                raise ConfigError(
                    f"{field} must name schedulers ({', '.join(schedulers) or 'there are none'}), got "
                    f"{', '.join(unknown)}"
                )
        for name in schedulers:
            if (chosen := _setting_for(interval, name, "step")) not in get_args(Interval):
                raise ConfigError(f"scheduler_interval must be one of {', '.join(get_args(Interval))}, got {chosen!r}")
        self.schedulers.clear()
        self.schedulers.update(schedulers)
        self._last_epochs = {each: each.last_epoch for each in schedulers.values() if hasattr(each, "last_epoch")}
        self._interval, self._monitor = interval, monitor

    def at(self, interval: Interval) -> list[LRScheduler]:
        """Return the schedulers that step at an interval, without `ReduceLROnPlateau`."""
        return [
            scheduler
            for name, scheduler in self.schedulers.items()
            if _setting_for(self._interval, name, "step") == interval and not isinstance(scheduler, ReduceLROnPlateau)
        ]

    def step(self, scheduler: LRScheduler, *metric: float) -> None:
        """Step a scheduler.

        Raises:
            StepError: other code has stepped it since the last call.
        """
        before = getattr(scheduler, "last_epoch", None)
        if self._last_epochs.get(scheduler, before) != before:
            name = next(name for name, each in self.schedulers.items() if each is scheduler)
            raise StepError(
                f"self.{name}.step() was called, but Headway steps the schedulers that are attributes, when "
                "scheduler_interval says: remove the call, or keep the scheduler in a list or a private attribute"
            )
        scheduler.step(*metric)  # type: ignore[arg-type]
        if before is not None:
            self._last_epochs[scheduler] = scheduler.last_epoch

    def forget_positions(self) -> None:
        """Accept that the schedulers' states were loaded."""
        self._last_epochs.clear()

    def step_after_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Step the schedulers that follow evaluations, and each `ReduceLROnPlateau` with its metric.

        Raises:
            ConfigError: the metric does not exist.
        """
        for scheduler in self.at("evaluation"):
            self.step(scheduler)
        for name, scheduler in self.schedulers.items():
            if isinstance(scheduler, ReduceLROnPlateau):
                monitor = _setting_for(self._monitor, name, "validation/loss")
                if monitor not in metrics:
                    raise ConfigError(f"scheduler_monitor must be one of {', '.join(metrics)}, got {monitor!r}")
                self.step(scheduler, metrics[monitor])


def _setting_for(setting: str | Mapping[str, str], name: str, default: str) -> str:
    return setting.get(name, default) if isinstance(setting, Mapping) else setting
