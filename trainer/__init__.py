"""Headway's trainer: a PyTorch training loop in one process or one of many ranks, without Ray.

Names are imported on first use, so tools that only read run folders do not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import optimizers as optimizers, schedules as schedules
    from .callbacks.base import Callback as Callback
    from .checkpoints.export import (
        export_pretrained as export_pretrained,
        export_safetensors as export_safetensors,
        load_weights as load_weights,
    )
    from .checkpoints.store import Checkpoint as Checkpoint, CheckpointStore as CheckpointStore
    from .config import (
        CheckpointConfig as CheckpointConfig,
        LossSpikeConfig as LossSpikeConfig,
        ParallelConfig as ParallelConfig,
        TrainerConfig as TrainerConfig,
    )
    from .data.protocols import BatchStream as BatchStream, Stateful as Stateful
    from .data.tree import average_records as average_records, map_tensors as map_tensors
    from .distributed.world import World as World
    from .errors import (
        CheckpointError as CheckpointError,
        ConfigError as ConfigError,
        DataError as DataError,
        HeadwayError as HeadwayError,
        LossSpikeError as LossSpikeError,
        NonFiniteError as NonFiniteError,
        ResumeError as ResumeError,
        StepError as StepError,
    )
    from .loop.progress import Duration as Duration, Progress as Progress
    from .metrics.histogram import Histogram as Histogram, histograms as histograms
    from .result import FitResult as FitResult, Table as Table, read_history as read_history
    from .session import Session as Session
    from .setup.dry_run import Estimate as Estimate
    from .step.precision import LossScaler as LossScaler
    from .supervised import SupervisedTrainer as SupervisedTrainer
    from .trackers.base import Tracker as Tracker
    from .trainer import Trainer as Trainer

_PUBLIC = {
    "callbacks.base": ("Callback",),
    "checkpoints.export": ("export_pretrained", "export_safetensors", "load_weights"),
    "checkpoints.store": ("Checkpoint", "CheckpointStore"),
    "config": ("CheckpointConfig", "LossSpikeConfig", "ParallelConfig", "TrainerConfig"),
    "data.protocols": ("BatchStream", "Stateful"),
    "data.tree": ("average_records", "map_tensors"),
    "distributed.world": ("World",),
    "errors": (
        "CheckpointError",
        "ConfigError",
        "DataError",
        "HeadwayError",
        "LossSpikeError",
        "NonFiniteError",
        "ResumeError",
        "StepError",
    ),
    "loop.progress": ("Duration", "Progress"),
    "metrics.histogram": ("Histogram", "histograms"),
    "result": ("FitResult", "Table", "read_history"),
    "session": ("Session",),
    "setup.dry_run": ("Estimate",),
    "step.precision": ("LossScaler",),
    "supervised": ("SupervisedTrainer",),
    "trackers.base": ("Tracker",),
    "trainer": ("Trainer",),
}
"""The public names, by the module that defines them. The block for type checkers above repeats them."""

_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = tuple(sorted((*_MODULE_OF, "optimizers", "schedules")))


def __getattr__(name: str) -> Any:
    if name in ("optimizers", "schedules"):
        return import_module(f".{name}", __name__)
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return list(__all__)
