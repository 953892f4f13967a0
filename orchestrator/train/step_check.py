"""One step on the CPU before workers are started, and its errors with the lines of the user's code."""

from __future__ import annotations

import linecache
import sysconfig
import traceback
from pathlib import Path
from types import CodeType

from headway import datasets, trainer
from headway.trainer.errors import StepError

from ..config.experiment import Experiment

_FIRST_LINES, _LAST_LINES = 3, 7


def check_step(experiment: Experiment) -> dict[str, float]:
    """Return the metrics of one update and one batch of each validation set, made in this process on the CPU.

    Raises:
        HeadwayError: as `fit` would raise.
        StepError: any other error, with the lines of the user's code that led to it.
    """
    made = experiment.trainer(experiment.config, printer=_print_nothing)
    try:
        return made.check_step(ranks=experiment.scaling.min_workers)
    except Exception as error:
        if type(error).__module__.startswith("headway."):
            raise
        raise StepError(describe_failure(error)) from error


def describe_failure(error: BaseException) -> str:
    """Return an error in a few lines: its text, and where the user's code led to it, the innermost line last."""
    text = [f"one step on the CPU fails with {type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
    lines = "\n".join(text).strip().splitlines()
    if (left_out := len(lines) - _FIRST_LINES - _LAST_LINES) > 1:
        # An error of a loader's worker process ends with what it is.
        lines = [*lines[:_FIRST_LINES], f"... ({left_out} more lines)", *lines[-_LAST_LINES:]]
    calls = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [call for call in calls if _is_users(call[0].co_filename)] or calls[-1:]
    return "\n".join([*lines, *(f"  {_place(code, line)}" for code, line in own)])


def _place(code: CodeType, line: int) -> str:
    path = Path(code.co_filename)
    file = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{file}:{line}, in {code.co_name}: {linecache.getline(code.co_filename, line).strip()}".removesuffix(": ")


def _is_users(file: str) -> bool:
    """Return whether a file is neither installed nor part of Python or Headway."""
    paths = sysconfig.get_paths()
    packages = [Path(__file__).parents[1], *(Path(folder) for each in (trainer, datasets) for folder in each.__path__)]
    installed = [Path(paths[kind]) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    return not file.startswith("<") and not any(Path(file).is_relative_to(each) for each in (*packages, *installed))


def _print_nothing(text: str) -> None:
    return
