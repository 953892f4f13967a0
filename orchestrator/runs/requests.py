"""Requests to the workers of a run, as files in its folder: to stop, or to scale up."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from ..errors import StorageError
from ..storage.folder import Folder
from .ownership import RUN_RECORD, lease_taken

_STOP = "stop.json"
_SCALE_UP = "grow.json"
_Status = Literal["stopped", "time_limit", "interrupted"]


@dataclass(frozen=True, kw_only=True)
class StopRequest:
    """A request to stop a run.

    Attributes:
        reason: reason for the record of the run.
        status: final status of the run.
        abort: stop immediately, without a checkpoint.
        within_s: grace period in seconds, then stop without a checkpoint; None: unlimited.
        start: lease of the start that it is for, after which it is void; None: the run's present or next start.
    """

    reason: str
    status: _Status = "stopped"
    abort: bool = False
    within_s: float | None = None
    start: str | None = None


def request_stop(folder: Folder, stop: StopRequest) -> None:
    """Request that a run stops, from any process that can write to its folder.

    Raises:
        StorageError: the folder cannot be written.
    """
    folder.write(_STOP, json.dumps(asdict(stop)))


def read_stop_request(folder: Folder) -> StopRequest | None:
    """Return the pending request; None if there is none or it cannot be read now. Callers poll."""
    with contextlib.suppress(StorageError, ValueError, TypeError):
        stop = StopRequest(**json.loads(folder.read(_STOP) or "null"))
        is_void = stop.start is not None and lease_taken(folder, stop.start, RUN_RECORD)
        return stop if stop.status in get_args(_Status) and not is_void else None
    return None


def clear_stop_request(folder: Folder) -> None:
    """Remove a request to an earlier start of the run."""
    folder.remove(_STOP)


def request_scale_up(folder: Folder, *, attempt: int, workers: int) -> None:
    """Request that the workers of an attempt save and exit, so that the next attempt has more workers.

    Args:
        folder: the run's folder.
        attempt: number of the attempt; workers of another one ignore the request.
        workers: number of workers that fit.

    Raises:
        StorageError: the folder cannot be written.
    """
    folder.write(_SCALE_UP, json.dumps({"attempt": attempt, "workers": workers}))


def read_scale_up_request(folder: Folder, attempt: int) -> int:
    """Return the number of workers that fit if this attempt was requested to scale up, else 0."""
    with contextlib.suppress(StorageError, ValueError, KeyError):
        request = json.loads(folder.read(_SCALE_UP) or "{}")
        return int(request["workers"]) if request["attempt"] == attempt else 0
    return 0
