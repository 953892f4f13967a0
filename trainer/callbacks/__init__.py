"""What watches a run: the base of all callbacks, and those that come with Headway."""

from .base import Callback, CallbackList, PlainFunction
from .early_stopping import EarlyStopping
from .ema import Ema
from .peak_memory import PeakMemory
from .progress_bar import Pace, ProgressBar, human_duration, progress_line
from .throughput import Throughput

__all__ = [
    "Callback",
    "CallbackList",
    "EarlyStopping",
    "Ema",
    "Pace",
    "PeakMemory",
    "PlainFunction",
    "ProgressBar",
    "Throughput",
    "human_duration",
    "progress_line",
]
