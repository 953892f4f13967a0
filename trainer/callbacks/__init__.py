"""What watches a run: the base of all callbacks, and those that come with Headway."""

from .base import Callback, CallbackList, PlainFunction
from .early_stopping import EarlyStopping
from .ema import Ema
from .garbage_collection import GarbageCollection
from .model_summary import ModelSummary, model_summary
from .peak_memory import PeakMemory
from .profile import Profile
from .progress_bar import Pace, ProgressBar, human_duration, progress_line
from .throughput import Throughput

__all__ = [
    "Callback",
    "CallbackList",
    "EarlyStopping",
    "Ema",
    "GarbageCollection",
    "ModelSummary",
    "Pace",
    "PeakMemory",
    "PlainFunction",
    "Profile",
    "ProgressBar",
    "Throughput",
    "human_duration",
    "model_summary",
    "progress_line",
]
