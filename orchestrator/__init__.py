"""Headway's orchestrator: experiments, runs and the command line, on Ray. Names are imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import resolve
    from .errors import RunConflictError, StorageError, TrainingFailedError
    from .experiment import Experiment, Retries, Scaling
    from .planning import Plan, plan
    from .report import write_report
    from .rerunning import rerun
    from .result import RunResult
    from .runs import Run, find_run, list_runs
    from .schedulers import ASHA, PBT, HyperBand, MedianStopping
    from .search import Search
    from .space import Choice, LogUniform, RandInt, Uniform, When
    from .sweep_result import SweepResult, TrialResult
    from .sweeping import sweep
    from .training import fit

__all__ = [
    "ASHA",
    "Choice",
    "Experiment",
    "HyperBand",
    "LogUniform",
    "MedianStopping",
    "PBT",
    "Plan",
    "RandInt",
    "Retries",
    "Run",
    "RunConflictError",
    "RunResult",
    "Scaling",
    "Search",
    "StorageError",
    "SweepResult",
    "TrainingFailedError",
    "TrialResult",
    "Uniform",
    "When",
    "find_run",
    "fit",
    "list_runs",
    "plan",
    "rerun",
    "resolve",
    "sweep",
    "write_report",
]

_HOME = {
    "ASHA": "schedulers",
    "Choice": "space",
    "Experiment": "experiment",
    "HyperBand": "schedulers",
    "LogUniform": "space",
    "MedianStopping": "schedulers",
    "PBT": "schedulers",
    "Plan": "planning",
    "RandInt": "space",
    "Retries": "experiment",
    "Run": "runs",
    "RunConflictError": "errors",
    "RunResult": "result",
    "Scaling": "experiment",
    "Search": "search",
    "StorageError": "errors",
    "SweepResult": "sweep_result",
    "TrainingFailedError": "errors",
    "TrialResult": "sweep_result",
    "Uniform": "space",
    "When": "space",
    "find_run": "runs",
    "fit": "training",
    "list_runs": "runs",
    "plan": "planning",
    "rerun": "rerunning",
    "resolve": "config",
    "sweep": "sweeping",
    "write_report": "report",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
