"""The base class of callbacks, and Headway's built-in callbacks. Names are imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import Callback as Callback, CallbackList as CallbackList, PlainFunction as PlainFunction
    from .early_stopping import EarlyStopping as EarlyStopping
    from .ema import Ema as Ema
    from .garbage_collection import GarbageCollection as GarbageCollection
    from .gradient_norms import GradientNorms as GradientNorms
    from .histograms import Histograms as Histograms
    from .peak_memory import PeakMemory as PeakMemory
    from .profile import Profile as Profile
    from .progress_bar import (
        Pace as Pace,
        ProgressBar as ProgressBar,
        human_duration as human_duration,
        progress_line as progress_line,
    )
    from .samples import Samples as Samples
    from .save_pretrained import SavePretrained as SavePretrained
    from .summary import ModelSummary as ModelSummary, model_summary as model_summary
    from .throughput import Throughput as Throughput
    from .time_limit import TimeLimit as TimeLimit

_PUBLIC = {
    "base": ("Callback", "CallbackList", "PlainFunction"),
    "early_stopping": ("EarlyStopping",),
    "ema": ("Ema",),
    "garbage_collection": ("GarbageCollection",),
    "gradient_norms": ("GradientNorms",),
    "histograms": ("Histograms",),
    "peak_memory": ("PeakMemory",),
    "profile": ("Profile",),
    "progress_bar": ("Pace", "ProgressBar", "human_duration", "progress_line"),
    "samples": ("Samples",),
    "save_pretrained": ("SavePretrained",),
    "summary": ("ModelSummary", "model_summary"),
    "throughput": ("Throughput",),
    "time_limit": ("TimeLimit",),
}
"""Public names by defining module. The block for type checkers above repeats them."""

_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = tuple(sorted(_MODULE_OF))


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return list(__all__)
