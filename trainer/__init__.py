"""Headway's trainer: a PyTorch training loop in one process or one of many ranks, without Ray."""

from . import optimizers, schedules
from .callbacks.base import Callback
from .checkpoint import Checkpoint, CheckpointStore
from .config import CheckpointConfig, LossSpikeConfig, ParallelConfig, TrainerConfig
from .errors import (
    CheckpointError,
    ConfigError,
    DataError,
    HeadwayError,
    LossSpikeError,
    NonFiniteError,
    ResumeError,
    StepError,
)
from .export import export_pretrained, export_safetensors, load_weights
from .histogram import Histogram, histograms
from .nested import average_records, map_tensors
from .progress import Duration, Progress
from .result import FitResult, read_history
from .sketch import Sketch
from .streams import BatchStream, Stateful
from .supervised import SupervisedTrainer
from .table import Table
from .trackers.base import Tracker
from .trainer import Trainer
from .world import World

__all__ = [
    "BatchStream",
    "Callback",
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointError",
    "CheckpointStore",
    "ConfigError",
    "DataError",
    "Duration",
    "FitResult",
    "HeadwayError",
    "Histogram",
    "LossSpikeConfig",
    "LossSpikeError",
    "NonFiniteError",
    "ParallelConfig",
    "Progress",
    "ResumeError",
    "Sketch",
    "Stateful",
    "StepError",
    "SupervisedTrainer",
    "Table",
    "Tracker",
    "Trainer",
    "TrainerConfig",
    "World",
    "average_records",
    "export_pretrained",
    "export_safetensors",
    "histograms",
    "load_weights",
    "map_tensors",
    "optimizers",
    "read_history",
    "schedules",
]
