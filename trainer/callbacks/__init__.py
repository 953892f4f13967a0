"""What watches a run: the base of all callbacks, and those that come with Headway."""

from .base import Callback, CallbackList, PlainFunction
from .early_stopping import EarlyStopping
from .ema import Ema
from .progress_bar import Pace, ProgressBar, human_duration, progress_line

__all__ = [
    "Callback",
    "CallbackList",
    "EarlyStopping",
    "Ema",
    "Pace",
    "PlainFunction",
    "ProgressBar",
    "human_duration",
    "progress_line",
]
