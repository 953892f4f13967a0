"""Headway's orchestrator: experiments, runs and the command line, on Ray. Names are imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config.experiment import Experiment as Experiment, Retries as Retries
    from .config.loader import resolve as resolve
    from .config.scaling import Scaling as Scaling
    from .errors import (
        RunConflictError as RunConflictError,
        StorageError as StorageError,
        TrainingFailedError as TrainingFailedError,
    )
    from .reports.run import write_report as write_report
    from .runs.pointer import checkpoint_path as checkpoint_path
    from .runs.rerun import rerun as rerun
    from .runs.result import RunResult as RunResult
    from .runs.run import Run as Run, find_run as find_run, list_runs as list_runs
    from .sweeps.optuna_search import PastTrial as PastTrial
    from .sweeps.record import TrialResult as TrialResult
    from .sweeps.result import SweepResult as SweepResult
    from .sweeps.schedulers import ASHA as ASHA, PBT as PBT, HyperBand as HyperBand, MedianStopping as MedianStopping
    from .sweeps.search import Search as Search
    from .sweeps.space import (
        Choice as Choice,
        Grid as Grid,
        LogUniform as LogUniform,
        Normal as Normal,
        RandInt as RandInt,
        Uniform as Uniform,
        When as When,
    )
    from .sweeps.sweep import sweep as sweep
    from .sweeps.tune.trainable import trainable as trainable
    from .train.dry_run import Plan as Plan, plan as plan
    from .train.fit import fit as fit
    from .train.train_loop import train_loop as train_loop

_PUBLIC = {
    "config.experiment": ("Experiment", "Retries"),
    "config.loader": ("resolve",),
    "config.scaling": ("Scaling",),
    "errors": ("RunConflictError", "StorageError", "TrainingFailedError"),
    "reports.run": ("write_report",),
    "runs.pointer": ("checkpoint_path",),
    "runs.rerun": ("rerun",),
    "runs.result": ("RunResult",),
    "runs.run": ("Run", "find_run", "list_runs"),
    "sweeps.sweep": ("sweep",),
    "sweeps.optuna_search": ("PastTrial",),
    "sweeps.record": ("TrialResult",),
    "sweeps.result": ("SweepResult",),
    "sweeps.schedulers": ("ASHA", "HyperBand", "MedianStopping", "PBT"),
    "sweeps.search": ("Search",),
    "sweeps.space": ("Choice", "Grid", "LogUniform", "Normal", "RandInt", "Uniform", "When"),
    "sweeps.tune.trainable": ("trainable",),
    "train.dry_run": ("Plan", "plan"),
    "train.fit": ("fit",),
    "train.train_loop": ("train_loop",),
}
"""Public names by defining module. Type checkers read the block above instead, which must list the same names."""

_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = tuple(sorted(_MODULE_OF))


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return list(__all__)
