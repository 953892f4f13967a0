"""Warns of torchmetrics objects of the user's own that nothing resets, whose values are means over the whole run."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable

from .class_check import names_used


def warn_of_metrics_never_reset(program: object, callbacks: Iterable[object]) -> None:
    """Warn of torchmetrics objects in attributes whose `compute` is called, where nothing calls `reset`.

    Objects that `configure_metrics` returns are reset before each evaluation.

    Args:
        program: the user's code.
        callbacks: may reset metrics of the program.
    """
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None:
        return
    kinds = (torchmetrics.Metric, torchmetrics.MetricCollection)
    held = [
        f"self.{name}"
        for name, value in vars(program).items()
        for each in (value.values() if type(value) is dict else (value,))
        if isinstance(each, kinds)
    ]
    if not held:
        return
    ours = __name__.partition(".")[0]
    used = {
        name
        for each in (program, *callbacks)
        for cls in type(each).__mro__
        if cls.__module__.partition(".")[0] != ours
        for name in names_used(cls)
    }
    if "compute" in used and "reset" not in used:
        warnings.warn(
            f"{held[0]} is a torchmetrics object that nothing resets, so that compute() returns its value over the "
            "whole run so far, and no checkpoint has its state: return it from configure_metrics() and call its "
            "update() in validation_step, or call reset() in the hook on_evaluation_start() or on_epoch_start()",
            stacklevel=2,
        )
