"""`headway runs stop`: ends a run that another process trains, here or elsewhere, through its folder."""

from __future__ import annotations

import time

from .asking import Stop, ask_to_stop
from .errors import StorageError
from .runs import Run, find_run

_REASON = "headway runs stop"


def stop_run(name: str, storage: str, *, now: bool = False, within_s: float | None = None, wait: bool = False) -> str:
    """Asks for the end of a run, and returns what came of it, for people. The run has the status "stopped" then.

    Args:
        name: of the run.
        storage: folder or URI that holds it.
        now: without a checkpoint.
        within_s: without a checkpoint if it has not ended after so many seconds.
        wait: until it has ended.

    Raises:
        ConfigError: there is no such run.
        StorageError: its folder cannot be read or written.
    """
    run = find_run(name, storage)
    if not _is_running(run):
        return f"{name} is not running: {_standing(run)}"
    ask_to_stop(run.folder, Stop(reason=_REASON, abort=now, within_s=within_s))
    if not wait:
        return f"{name} is asked to {'end at once' if now else 'save a checkpoint and end'}"
    while _is_running(run):
        time.sleep(0.2 if run.folder.is_local else 2.0)
        run = _read_again(run)
    return f"{name} has ended: {_standing(run)}"


def _is_running(run: Run) -> bool:
    return run.status == "running"


def _read_again(run: Run) -> Run:
    try:
        return Run(run.run_dir)
    except StorageError:
        return run


def _standing(run: Run) -> str:
    record = run.record
    told = f"{run.status} after {record.steps:,} steps" + (f" ({run.reason})" if run.reason else "")
    return f"{told}; to go on, start it again" if not run.is_finished else told
