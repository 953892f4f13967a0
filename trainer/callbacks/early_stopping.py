"""Ends a run whose metric gains no more, has reached its goal, or has left all bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..checkpoints.retention import Best, Mode, is_better
from ..errors import ConfigError
from .base import Callback

if TYPE_CHECKING:
    from ..trainer import Trainer


class EarlyStopping(Callback):
    """Asks for a stop, with the reason in words, when a metric has not gained for `patience` evaluations in a row.

    It judges every value that the run logs of the metric: one per evaluation for `validation/...`, one per record of
    the log for what training gives, such as `train/loss`. A value that is NaN or infinite is no gain. An evaluation
    that the run does not log (`trainer.evaluate()` called by hand) is not judged. The count goes into checkpoints: a
    run that it has stopped, resumed with no more patience, stops before its first update.

    Args:
        monitor: name of the metric in the log.
        mode: "min" where lower is better, "max" where higher is.
        patience: so many values in a row without gain end the run; None leaves that to the other rules.
        min_delta: a gain beats the best value by more than this.
        target: the run has succeeded, and ends, at a value as good as this.
        divergence: the run has failed, and ends, at a value worse than this or one that is not finite.
        warmup: so many values at first are not judged at all.

    Attributes:
        best: the best value judged so far with its step; `best.value` is None before there is one.
        without_gain: judged values in a row that did not beat it.

    Raises:
        ConfigError: the arguments make no sense; or, at the first evaluation, the metric is not there.

    Example:
        >>> trainer = Digits(config, callbacks=[EarlyStopping("validation/accuracy", mode="max", patience=5)])
    """

    def __init__(
        self,
        monitor: str = "validation/loss",
        *,
        mode: Mode = "min",
        patience: int | None = 3,
        min_delta: float = 0.0,
        target: float | None = None,
        divergence: float | None = None,
        warmup: int = 0,
    ) -> None:
        if patience is not None and (not isinstance(patience, int) or isinstance(patience, bool) or patience < 1):
            raise ConfigError(f"patience is a whole number of evaluations from 1, or None, not {patience!r}")
        if not isinstance(warmup, int) or isinstance(warmup, bool) or warmup < 0:
            raise ConfigError(f"warmup is a whole number of evaluations from 0, not {warmup!r}")
        if patience is None and target is None and divergence is None:
            raise ConfigError("EarlyStopping without patience, target and divergence never stops: give one of them")
        for name, bound in (("target", target), ("divergence", divergence)):
            if bound is not None and not math.isfinite(bound):
                raise ConfigError(f"{name} is a finite number, not {bound!r}")
        if target is not None and divergence is not None and not is_better(target, divergence, mode=mode):
            raise ConfigError(f"target {target} is not better than divergence {divergence} in mode {mode!r}")
        self.monitor, self.patience, self.target, self.divergence = monitor, patience, target, divergence
        self.best: Best = Best(mode, min_delta)
        self.without_gain: int = 0
        self._warmup_left = warmup

    def on_fit_start(self, trainer: Trainer[Any]) -> None:
        """Stops a run again that it had stopped already."""
        if self.patience is not None and self.without_gain >= self.patience:
            trainer.request_stop(f"early stopping: {self._out_of_patience()}")

    def on_log(self, trainer: Trainer[Any], metrics: Mapping[str, float]) -> None:
        """Judges the metric, in the records that should have it.

        Raises:
            ConfigError: it is not there; with what is.
        """
        if not _comes_with(metrics, self.monitor):
            return
        if self.monitor not in metrics:
            raise ConfigError(
                f"EarlyStopping watches {self.monitor!r}, which is not logged; there is "
                f"{', '.join(sorted(metrics)) or 'nothing'}"
            )
        if self._warmup_left:
            self._warmup_left -= 1
        elif reason := self._judge(metrics[self.monitor], step=trainer.global_step):
            trainer.request_stop(f"early stopping: {reason}")

    def state_dict(self) -> dict[str, Any]:
        """Returns the best value, the count, and what is left of the warm-up."""
        return {"best": self.best.state_dict(), "without_gain": self.without_gain, "warmup_left": self._warmup_left}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Takes them over."""
        self.best.load_state_dict(state_dict["best"])
        self.without_gain, self._warmup_left = state_dict["without_gain"], state_dict["warmup_left"]

    def _judge(self, value: float, *, step: int) -> str | None:
        """Counts a value, and returns why the run is to end, or None."""
        self.without_gain = 0 if self.best.update(value, step=step) else self.without_gain + 1
        mode = self.best.mode
        if self.target is not None and math.isfinite(value) and not is_better(self.target, value, mode=mode):
            return f"{self.monitor} is {value:.6g}, and the target was {self.target:.6g}"
        if self.divergence is not None and not math.isfinite(value):
            return f"{self.monitor} diverged: it is {value}"
        if self.divergence is not None and is_better(self.divergence, value, mode=mode):
            return f"{self.monitor} diverged: it is {value:.6g}, and the limit was {self.divergence:.6g}"
        if self.patience is not None and self.without_gain >= self.patience:
            return self._out_of_patience()
        return None

    def _out_of_patience(self) -> str:
        best = "there was no finite value"
        if self.best.value is not None:
            best = f"the best was {self.best.value:.6g} at step {self.best.step}"
        times = "evaluation" if self.monitor.startswith("validation/") else "record"
        return f"{self.monitor} has not gained for {self.without_gain} {times}{'s' * (self.without_gain != 1)}; {best}"


def _comes_with(record: Mapping[str, float], monitor: str) -> bool:
    """Whether a record is of the kind that a metric is in: of training, of an evaluation, or a note of neither."""
    # Only records of training have the time that it took; what is logged beside an evaluation may be in them, too.
    is_of_training = "elapsed_s" in record
    if not monitor.startswith("validation/"):
        return is_of_training
    return not is_of_training and any(name.startswith("validation/") for name in record)
