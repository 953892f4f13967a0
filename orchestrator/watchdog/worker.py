"""A thread in each worker that writes a heartbeat twice a second and follows the driver's orders.

Heartbeats and orders are small files in `watch/` of the run's folder: they remain when a process is stopped or the
cluster is gone, need no actor, and never block a step. On an object store the interval is five seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

from headway.trainer.loop.timing import Activity

from ..errors import StorageError
from ..storage.events import Event
from ..storage.folder import Folder, join
from ..train.time_spent import time_spent

if TYPE_CHECKING:
    from headway.trainer.trainer import Trainer

ORDER = "order.json"


def watch_folder(folder: Folder) -> Folder:
    """Return the folder of the heartbeats, orders and stacks of a run."""
    return Folder(join(folder.place, "watch"))


def heartbeat_interval_s(folder: Folder) -> float:
    """Return the seconds between two heartbeats of a rank."""
    return 0.5 if folder.is_local else 5.0


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
    """

    def __init__(self, folder: Folder, *, rank: int, attempt: int) -> None:
        self._folder, self._rank, self._attempt = watch_folder(folder), rank, attempt
        self._activity = Activity()
        self._trainer: Trainer[Any] | None = None
        self._beats = 0
        self._last_order = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headway-watchdog", daemon=True)

    def attach(self, trainer: Trainer[Any]) -> None:
        """Report this trainer's activity from now on."""
        self._trainer, self._activity = trainer, trainer.activity

    def __enter__(self) -> Watchdog:
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
                self._follow_order()
            if self._ended.wait(heartbeat_interval_s(self._folder)):
                return

    def _beat(self, *, ended: bool = False) -> None:
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
        self._folder.write(heartbeat_file(self._rank), json.dumps(beat))

    def _follow_order(self) -> None:
        """Write this process's stacks, and exit, as the driver's latest order says."""
        try:
            order = json.loads(self._folder.read(ORDER) or "null")
        except ValueError:
            return
        if not order or order["attempt"] != self._attempt or order["number"] <= self._last_order:
            return
        self._last_order = order["number"]
        with contextlib.suppress(StorageError):
            self._folder.write(stacks_file(self._attempt, self._rank), stacks(self._rank, order["why"]))
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
