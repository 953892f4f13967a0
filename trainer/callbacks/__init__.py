"""What watches a run: the base of all callbacks, and those that come with Headway. Names are imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import Callback, CallbackList, PlainFunction
    from .early_stopping import EarlyStopping
    from .ema import Ema
    from .garbage_collection import GarbageCollection
    from .gradient_norms import GradientNorms
    from .histograms import Histograms
    from .peak_memory import PeakMemory
    from .profile import Profile
    from .progress_bar import Pace, ProgressBar, human_duration, progress_line
    from .samples import Samples
    from .summary import ModelSummary, model_summary
    from .throughput import Throughput
    from .time_limit import TimeLimit

__all__ = [
    "Callback",
    "CallbackList",
    "EarlyStopping",
    "Ema",
    "GarbageCollection",
    "GradientNorms",
    "Histograms",
    "ModelSummary",
    "Pace",
    "PeakMemory",
    "PlainFunction",
    "Profile",
    "ProgressBar",
    "Samples",
    "Throughput",
    "TimeLimit",
    "human_duration",
    "model_summary",
    "progress_line",
]

_HOME = {
    "Callback": "base",
    "CallbackList": "base",
    "EarlyStopping": "early_stopping",
    "Ema": "ema",
    "GarbageCollection": "garbage_collection",
    "GradientNorms": "gradient_norms",
    "Histograms": "histograms",
    "ModelSummary": "summary",
    "Pace": "progress_bar",
    "PeakMemory": "peak_memory",
    "PlainFunction": "base",
    "Profile": "profile",
    "ProgressBar": "progress_bar",
    "Samples": "samples",
    "Throughput": "throughput",
    "TimeLimit": "time_limit",
    "human_duration": "progress_bar",
    "model_summary": "summary",
    "progress_line": "progress_bar",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
