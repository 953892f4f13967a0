"""`headway runs stop`: stop a run or a sweep of another process, on any machine, through its folder."""

from __future__ import annotations

import time

from headway.trainer.errors import ConfigError

from ..errors import StorageError
from ..storage.events import read_events
from ..storage.folder import Folder, absolute, join
from ..sweeps.record import Sweep
from .requests import StopRequest, request_stop
from .result import describe_end
from .run import SILENT_S, SWEEP_RECORD, Run, find_run

_REASON = "headway runs stop"


def stop_run(name: str, storage: str, *, now: bool = False, within_s: float | None = None, wait: bool = False) -> str:
    """Request that a run or a sweep stops, and return a message for the user. The status becomes "stopped".

    A sweep stops its trials and starts no new ones; the next start resumes them.

    Args:
        name: name of the run or the sweep.
        storage: folder or URI that holds it.
        now: stop immediately, without a checkpoint.
        within_s: grace period in seconds, then stop without a checkpoint.
        wait: wait until it has ended.

    Raises:
        ConfigError: there is no such run.
        StorageError: its folder cannot be read or written.
    """
    place = join(absolute(storage), name)
    found: Run | Sweep = Sweep(place) if Folder(place).exists(SWEEP_RECORD) else find_run(name, storage)
    if not _is_running(found):
        return f"{name} is not running: {_summary(found)}"
    request_stop(found.folder, StopRequest(reason=_REASON, abort=now, within_s=within_s))
    if not wait:
        saves = "save a checkpoint of each trial and stop" if isinstance(found, Sweep) else "save a checkpoint and stop"
        return f"{name} was asked to {'stop immediately' if now else saves}"
    heartbeat, changed_s = found.record.driver.heartbeat, time.monotonic()
    while _is_running(found):
        if found.record.driver.heartbeat != heartbeat:
            heartbeat, changed_s = found.record.driver.heartbeat, time.monotonic()
        elif time.monotonic() - changed_s >= SILENT_S and found.record.driver.process.is_alive() is None:
            return f"{name} may have ended: its driver has written nothing for {SILENT_S:.0f} s; {_summary(found)}"
        time.sleep(0.2 if found.folder.is_local else 2.0)
        found = _reload(found)
    return f"{name} has ended: {_summary(found)}"


def _is_running(found: Run | Sweep) -> bool:
    """Return whether a driver may still run; for one on another machine its record decides, not its clock."""
    return found.record.status == "running" and found.record.driver.process.is_alive() is not False


def _reload(found: Run | Sweep) -> Run | Sweep:
    try:
        return type(found)(found.folder.place)
    except (ConfigError, StorageError):
        return found


def _summary(found: Run | Sweep) -> str:
    if isinstance(found, Sweep):
        ended = sum(trial.has_ended for trial in found.trials())
        summary = f"{found.status} with {ended} of {found.record.trials} trials done"
        summary += f" ({found.record.reason})" if found.record.reason else ""
        return summary if found.status == "completed" else f"{summary}; to resume, start it again"
    summary = describe_end(found.status, found.record.steps) + (f" ({found.reason})" if found.reason else "")
    if found.is_finished:
        return summary
    starts = [event for event in read_events(found.folder) if event["event"] == "driver_started"]
    without = " without --resume never" if starts and starts[-1].get("resume") == "never" else ""
    return f"{summary}; to resume, start it again{without}"
