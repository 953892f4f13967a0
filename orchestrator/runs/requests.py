"""What is asked of workers from outside: to end, or to come back as more. Small files in the folder of their run."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from ..errors import StorageError
from ..storage.folder import Folder

_FILE = "stop.json"
_GROW = "grow.json"
_Status = Literal["stopped", "time_limit", "interrupted"]


@dataclass(frozen=True, kw_only=True)
class StopRequest:
    """A wish that a run end.

    Attributes:
        reason: in words, for the record.
        status: how the run is to be called then.
        abort: without a checkpoint, right now.
        within_s: after so many seconds it is to end without a checkpoint, if it has not ended by then.
    """

    reason: str
    status: _Status = "stopped"
    abort: bool = False
    within_s: float | None = None


def request_stop(folder: Folder, stop: StopRequest) -> None:
    """Asks whoever trains the run of a folder to end it, from any process that can write to it.

    Raises:
        StorageError: it cannot be written.
    """
    folder.write(_FILE, json.dumps(asdict(stop)))


def read_stop_request(folder: Folder) -> StopRequest | None:
    """Returns what was asked for; None also where that cannot be read for the moment: it is asked again soon."""
    with contextlib.suppress(StorageError, ValueError, TypeError):
        asked = StopRequest(**json.loads(folder.read(_FILE) or "null"))
        return asked if asked.status in get_args(_Status) else None
    return None


def clear_stop_request(folder: Folder) -> None:
    """Forgets what was asked of an earlier life of the run."""
    folder.remove(_FILE)


def request_scale_up(folder: Folder, *, attempt: int, workers: int) -> None:
    """Asks the workers of an attempt to save and leave, because there is room for more of them.

    Args:
        folder: of the run.
        attempt: theirs; those of another one take no notice.
        workers: for how many there is room.

    Raises:
        StorageError: it cannot be written.
    """
    folder.write(_GROW, json.dumps({"attempt": attempt, "workers": workers}))


def read_scale_up_request(folder: Folder, attempt: int) -> int:
    """Returns for how many workers there is room, if those of this attempt were asked to leave for it; else 0."""
    with contextlib.suppress(StorageError, ValueError, KeyError):
        asked = json.loads(folder.read(_GROW) or "{}")
        return int(asked["workers"]) if asked["attempt"] == attempt else 0
    return 0
