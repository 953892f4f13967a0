"""What watches a run: the base of all callbacks, and those that come with Headway."""

from .base import Callback, CallbackList, PlainFunction
from .early_stopping import EarlyStopping
from .ema import Ema
from .garbage_collection import GarbageCollection
from .gradient_norms import GradientNorms
from .histograms import Histograms
from .model_summary import ModelSummary, model_summary
from .peak_memory import PeakMemory
from .profile import Profile
from .progress_bar import Pace, ProgressBar, human_duration, progress_line
from .samples import Samples
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
