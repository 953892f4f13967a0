"""What is asked of a run from outside: to end. One small file in its folder, on whatever storage that lies."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from .errors import StorageError
from .storage import Folder

_FILE = "stop.json"
_Status = Literal["stopped", "time_limit", "interrupted"]


@dataclass(frozen=True, kw_only=True)
class Stop:
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


def ask_to_stop(folder: Folder, stop: Stop) -> None:
    """Asks whoever trains the run of a folder to end it, from any process that can write to it.

    Raises:
        StorageError: it cannot be written.
    """
    folder.write(_FILE, json.dumps(asdict(stop)))


def asked_to_stop(folder: Folder) -> Stop | None:
    """Returns what was asked for; None also where that cannot be read for the moment: it is asked again soon."""
    with contextlib.suppress(StorageError, ValueError, TypeError):
        asked = Stop(**json.loads(folder.read(_FILE) or "null"))
        return asked if asked.status in get_args(_Status) else None
    return None


def withdraw_stop(folder: Folder) -> None:
    """Forgets what was asked of an earlier life of the run."""
    folder.remove(_FILE)
