"""Requests to the workers of a run from other processes, as small files in its folder: to stop, or to scale up."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from ..errors import StorageError
from ..storage.folder import Folder

_STOP = "stop.json"
_SCALE_UP = "grow.json"
_Status = Literal["stopped", "time_limit", "interrupted"]


@dataclass(frozen=True, kw_only=True)
class StopRequest:
    """A request to stop a run.

    Attributes:
        reason: for the record.
        status: final status of the run.
        abort: stop immediately, without a checkpoint.
        within_s: seconds after which to stop without a checkpoint if the run has not ended; None: no limit.
    """

    reason: str
    status: _Status = "stopped"
    abort: bool = False
    within_s: float | None = None


def request_stop(folder: Folder, stop: StopRequest) -> None:
    """Request that the run of a folder stops, from any process that can write to the folder.

    Raises:
        StorageError: the folder cannot be written.
    """
    folder.write(_STOP, json.dumps(asdict(stop)))


def read_stop_request(folder: Folder) -> StopRequest | None:
    """Return the pending request; None if there is none, or if it cannot be read now. Callers poll it."""
    with contextlib.suppress(StorageError, ValueError, TypeError):
        stop = StopRequest(**json.loads(folder.read(_STOP) or "null"))
        return stop if stop.status in get_args(_Status) else None
    return None


def clear_stop_request(folder: Folder) -> None:
    """Remove a request that was made to an earlier start of the run."""
    folder.remove(_STOP)


def request_scale_up(folder: Folder, *, attempt: int, workers: int) -> None:
    """Ask the workers of an attempt to save and exit, so that the next one can have more.

    Args:
        folder: the run's folder.
        attempt: number of the attempt; workers of another one ignore the request.
        workers: how many workers fit.

    Raises:
        StorageError: the folder cannot be written.
    """
    folder.write(_SCALE_UP, json.dumps({"attempt": attempt, "workers": workers}))


def read_scale_up_request(folder: Folder, attempt: int) -> int:
    """Return how many workers fit if this attempt was asked to scale up, else 0."""
    with contextlib.suppress(StorageError, ValueError, KeyError):
        request = json.loads(folder.read(_SCALE_UP) or "{}")
        return int(request["workers"]) if request["attempt"] == attempt else 0
    return 0
