"""A thread in each worker that sends a heartbeat twice a second and follows the driver's orders.

On a local disk, heartbeats and orders are small files in `watch/` of the run's folder. Elsewhere they go through the
mailbox (`mailbox.py`); then only the main rank writes a file, as the record of its time, and other ranks do if the
mailbox does not answer. Neither ever blocks a step.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headway.trainer.loop.timing import Activity

from ..errors import StorageError
from ..storage.events import Event
from ..storage.folder import Folder, join
from ..train.time_spent import time_spent
from .mailbox import RankMailbox, Requests

if TYPE_CHECKING:
    from headway.trainer.trainer import Trainer

ORDER = "order.json"


def watch_folder(folder: Folder) -> Folder:
    """Return the folder of the heartbeats, orders and stacks of a run."""
    return Folder(join(folder.place, "watch"))


def file_interval_s(folder: Folder) -> float:
    """Return the seconds between two heartbeats of a rank in a file."""
    return 0.5 if folder.is_local else 5.0


def heartbeat_interval_s(ranks: int) -> float:
    """Return the seconds between two heartbeats of a rank through the mailbox, which gets at most 512 a second."""
    return max(0.5, ranks / 512)


def heartbeat_file(rank: int) -> str:
    """Return the name of a rank's heartbeat file."""
    return f"rank-{rank}.json"


def stacks_file(attempt: int, rank: int) -> str:
    """Return the name of the file with a rank's stacks."""
    return f"stacks-{attempt}-rank-{rank}.txt"


def last_heartbeat_event(folder: Folder) -> Event | None:
    """Return the main rank's last heartbeat as an event "last_heard"; None if there is none.

    Args:
        folder: the run's folder.
    """
    with contextlib.suppress(StorageError, ValueError):
        beat = json.loads(watch_folder(folder).read(heartbeat_file(0)) or "null")
        if beat and "spent" in beat:
            return {"time": beat["spent"]["at"], "event": "last_heard", "spent": beat["spent"]}
    return None


class Watchdog:
    """The watchdog thread of one rank, as a context manager.

    Args:
        folder: the run's folder.
        rank: rank of this process.
        attempt: number of this attempt.
        ranks: number of ranks.
        mailbox: to which heartbeats are sent; None for files only.

    Attributes:
        requests: of the driver, as the mailbox gave them last.
    """

    def __init__(
        self, folder: Folder, *, rank: int, attempt: int, ranks: int = 1, mailbox: RankMailbox | None = None
    ) -> None:
        self.requests: Requests = {}
        self._file_s = file_interval_s(folder)
        self._interval_s = self._file_s if mailbox is None else heartbeat_interval_s(ranks)
        self._written_s = -math.inf
        self._mailbox = mailbox
        self._folder, self._rank, self._attempt = watch_folder(folder), rank, attempt
        self._activity = Activity()
        self._trainer: Trainer[Any] | None = None
        self._beats = 0
        self._last_order = 0
        self._stacks: list[str] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headway-watchdog", daemon=True)

    def attach(self, trainer: Trainer[Any]) -> None:
        """Report this trainer's activity from now on."""
        self._trainer, self._activity = trainer, trainer.activity

    def __enter__(self) -> Watchdog:
        if self._mailbox is None or self._rank == 0:
            self._folder.prepare()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(5.0)
        with contextlib.suppress(StorageError):
            self._beat(ended=True)

    def _run(self) -> None:
        while True:
            # The training itself reports a storage that is unavailable.
            with contextlib.suppress(StorageError):
                self._beat()
            if self._ended.wait(self._interval_s):
                return

    def _beat(self, *, ended: bool = False) -> None:
        """Send a heartbeat, and follow the driver's orders."""
        beat = self._make_beat(ended=ended)
        requests = None if self._mailbox is None else self._mailbox.send(beat)
        if requests is not None:
            self.requests = requests
            self._follow(requests.get("order"))
        now_s = time.monotonic()
        if (requests is None or self._rank == 0) and (ended or now_s - self._written_s >= 0.9 * self._file_s):
            self._written_s = now_s
            self._folder.write(heartbeat_file(self._rank), json.dumps(beat))
            if requests is None and not ended:
                self._follow_file()

    def _make_beat(self, *, ended: bool) -> dict[str, Any]:
        activity = self._activity
        self._beats += 1
        phase = "ended" if ended else activity.phase
        step = 0 if self._trainer is None else self._trainer.global_step
        beat = {
            "attempt": self._attempt,
            "rank": self._rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "beat": self._beats,
            "phase": phase,
            "for_s": time.monotonic() - activity.since_s,
            "usual_s": activity.usual_s(phase),
            "updates": activity.updates,
            "batches": activity.batches,
            "step": step,
        }
        if self._rank == 0:
            beat["spent"] = time_spent(activity, attempt=self._attempt, step=step)
        return beat

    def _follow_file(self) -> None:
        with contextlib.suppress(ValueError):
            self._follow(json.loads(self._folder.read(ORDER) or "null"))

    def _follow(self, order: Mapping[str, Any] | None) -> None:
        """Write this process's stacks, and exit, as the driver's latest order says."""
        if not order or order["attempt"] != self._attempt or order["number"] <= self._last_order:
            return
        self._last_order = order["number"]
        # The first stacks show the hang; until the last ones, the training thread may have noticed, and left.
        self._stacks.append(stacks(self._rank, order["why"]))
        with contextlib.suppress(StorageError):
            self._folder.write(stacks_file(self._attempt, self._rank), "\n\n".join(self._stacks))
        if order["end"]:
            # The training thread hangs, in Python or in a collective, so the process cannot exit in order.
            os._exit(1)


def stacks(rank: int, why: str) -> str:
    """Return the stacks of all other threads of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"rank {rank}, process {os.getpid()} on {socket.gethostname()}, {time.strftime('%Y-%m-%d %H:%M:%S')}: {why}"
    ]
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            parts.append(f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}")
    return "\n\n".join(parts)
