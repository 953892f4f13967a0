"""Headway's orchestrator: experiments, runs and the command line, on Ray. Names are imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import resolve
    from .errors import RunConflictError, StorageError, TrainingFailedError
    from .experiment import Experiment, Retries, Scaling
    from .planning import Plan, plan
    from .result import RunResult
    from .runs import Run, find_run, list_runs
    from .training import fit

__all__ = [
    "Experiment",
    "Plan",
    "Retries",
    "Run",
    "RunConflictError",
    "RunResult",
    "Scaling",
    "StorageError",
    "TrainingFailedError",
    "find_run",
    "fit",
    "list_runs",
    "plan",
    "resolve",
]

_HOME = {
    "Experiment": "experiment",
    "Plan": "planning",
    "Retries": "experiment",
    "Run": "runs",
    "RunConflictError": "errors",
    "RunResult": "result",
    "Scaling": "experiment",
    "StorageError": "errors",
    "TrainingFailedError": "errors",
    "find_run": "runs",
    "fit": "training",
    "list_runs": "runs",
    "plan": "planning",
    "resolve": "config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
