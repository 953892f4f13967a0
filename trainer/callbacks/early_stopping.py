"""Stop a run when a metric no longer improves, reaches a target or diverges."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..checkpoints.retention import Best, Mode, is_better, warn_of_mode
from ..errors import ConfigError
from .base import Callback

if TYPE_CHECKING:
    from ..trainer import Trainer


class EarlyStopping(Callback):
    """Requests a stop when a metric has not improved for `patience` evaluations in a row.

    Checks every logged value of the metric: one per evaluation for `validation/...`, one per training record for a
    metric such as `train/loss`. NaN and infinity never improve it. Evaluations that are not logged
    (`trainer.evaluate()` called directly) are not checked. The count is in checkpoints: a stopped run that is resumed
    with the same patience stops again before its first update.

    Args:
        monitor: name of the metric in the log.
        mode: "min" if lower is better, "max" if higher is.
        patience: number of consecutive values without improvement that stops the run; None disables this rule.
        min_delta: an improvement must beat the best value by more than this.
        target: stop, with success, at a value at least as good as this.
        divergence: stop, with failure, at a value worse than this or not finite.
        warmup: number of initial values to ignore.

    Attributes:
        best: the best value so far with its step; `best.value` is None before there is one.
        without_gain: number of consecutive values without improvement.

    Raises:
        ConfigError: an argument is invalid; or, at the first evaluation, the metric is not logged.

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
            raise ConfigError(f"patience must be an integer >= 1 (evaluations) or None, got {patience!r}")
        if not isinstance(warmup, int) or isinstance(warmup, bool) or warmup < 0:
            raise ConfigError(f"warmup must be an integer >= 0 (evaluations), got {warmup!r}")
        if patience is None and target is None and divergence is None:
            raise ConfigError("EarlyStopping never stops: set patience, target or divergence")
        for name, bound in (("target", target), ("divergence", divergence)):
            if bound is not None and not math.isfinite(bound):
                raise ConfigError(f"{name} must be a finite number, got {bound!r}")
        if target is not None and divergence is not None and not is_better(target, divergence, mode=mode):
            raise ConfigError(f"target must be better than divergence in mode {mode!r}, got {target} and {divergence}")
        self.monitor, self.patience, self.target, self.divergence = monitor, patience, target, divergence
        self.best: Best = Best(mode, min_delta)
        warn_of_mode("EarlyStopping", monitor, mode)
        self.without_gain: int = 0
        self._warmup_left = warmup

    def on_fit_start(self, trainer: Trainer[Any]) -> None:
        """Stop a resumed run that this callback had already stopped."""
        if self.patience is not None and self.without_gain >= self.patience:
            trainer.request_stop(f"early stopping: {self._no_improvement()}")

    def on_log(self, trainer: Trainer[Any], metrics: Mapping[str, float]) -> None:
        """Check the metric, in the records that should have it.

        Raises:
            ConfigError: the metric is missing; the message lists the logged ones.
        """
        if not _should_have(metrics, self.monitor):
            return
        if self.monitor not in metrics:
            prefix, _, rest = self.monitor.replace("/", "_").partition("_")
            of_evaluations = prefix in ("val", "valid", "eval", "test") and rest
            raise ConfigError(
                f"EarlyStopping monitors {self.monitor!r}, which is not logged; "
                + (
                    f"metrics of evaluations begin with 'validation/': did you mean 'validation/{rest}'?"
                    if of_evaluations
                    else f"logged metrics: {', '.join(sorted(metrics)) or 'none'}, and those of evaluations, which "
                    "begin with 'validation/'"
                )
            )
        if self._warmup_left:
            self._warmup_left -= 1
        elif reason := self._check(metrics[self.monitor], step=trainer.global_step):
            trainer.request_stop(f"early stopping: {reason}")

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, the count and the remaining warm-up."""
        return {"best": self.best.state_dict(), "without_gain": self.without_gain, "warmup_left": self._warmup_left}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore them."""
        self.best.load_state_dict(state_dict["best"])
        self.without_gain, self._warmup_left = state_dict["without_gain"], state_dict["warmup_left"]

    def _check(self, value: float, *, step: int) -> str | None:
        """Record a value; return why the run must stop, or None."""
        self.without_gain = 0 if self.best.update(value, step=step) else self.without_gain + 1
        mode = self.best.mode
        if self.target is not None and math.isfinite(value) and not is_better(self.target, value, mode=mode):
            return f"{self.monitor} is {value:.6g}; the target was {self.target:.6g}"
        if self.divergence is not None and not math.isfinite(value):
            return f"{self.monitor} diverged: it is {value}"
        if self.divergence is not None and is_better(self.divergence, value, mode=mode):
            return f"{self.monitor} diverged: it is {value:.6g}; the limit was {self.divergence:.6g}"
        if self.patience is not None and self.without_gain >= self.patience:
            return self._no_improvement()
        return None

    def _no_improvement(self) -> str:
        best = "no value was finite"
        if self.best.value is not None:
            best = f"the best was {self.best.value:.6g} at step {self.best.step}"
        times = "evaluation" if self.monitor.startswith("validation/") else "record"
        return (
            f"{self.monitor} has not improved for {self.without_gain} {times}{'s' * (self.without_gain != 1)}; {best}"
        )


def _should_have(record: Mapping[str, float], monitor: str) -> bool:
    """Whether this kind of record, of training or of an evaluation, should have the metric."""
    # Only training records have "elapsed_s"; they may also have metrics under "validation/".
    is_training = "elapsed_s" in record
    if not monitor.startswith("validation/"):
        return is_training
    return not is_training and any(name.startswith("validation/") for name in record)
