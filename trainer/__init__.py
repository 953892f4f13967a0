"""Headway's trainer: a PyTorch training loop in one process or one of many ranks, without Ray.

Names are imported on first use: who only looks at runs need not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_HOME = {
    "BatchStream": "streams",
    "Callback": "callbacks.base",
    "Checkpoint": "checkpoint",
    "CheckpointConfig": "config",
    "CheckpointError": "errors",
    "CheckpointStore": "checkpoint",
    "ConfigError": "errors",
    "DataError": "errors",
    "Duration": "progress",
    "FitResult": "result",
    "HeadwayError": "errors",
    "Histogram": "histogram",
    "LossSpikeConfig": "config",
    "LossSpikeError": "errors",
    "NonFiniteError": "errors",
    "ParallelConfig": "config",
    "Progress": "progress",
    "ResumeError": "errors",
    "Sketch": "sketch",
    "Stateful": "streams",
    "StepError": "errors",
    "SupervisedTrainer": "supervised",
    "Table": "table",
    "Tracker": "trackers.base",
    "Trainer": "trainer",
    "TrainerConfig": "config",
    "World": "world",
    "average_records": "nested",
    "export_pretrained": "export",
    "export_safetensors": "export",
    "histograms": "histogram",
    "load_weights": "export",
    "map_tensors": "nested",
    "read_history": "result",
}


def __getattr__(name: str) -> Any:
    if name in ("optimizers", "schedules"):
        return import_module(f".{name}", __name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
