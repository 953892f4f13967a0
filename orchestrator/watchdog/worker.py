"""In each worker, a thread beside the training: says twice a second what its rank does, and obeys the driver.

What it says, and what it is told, are small files in the run's folder, `watch/`: they are there when a process is
stopped or the cluster is gone, they need no actor, and nothing on the path of a step waits for them. An object store
is asked every five seconds.
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
    """Returns where the ranks of a run are state."""
    return Folder(join(folder.place, "watch"))


def heartbeat_interval_s(folder: Folder) -> float:
    """How often a rank says what it does."""
    return 0.5 if folder.is_local else 5.0


def heartbeat_file(rank: int) -> str:
    """The name of the file in which a rank says what it does."""
    return f"rank-{rank}.json"


def stacks_file(attempt: int, rank: int) -> str:
    """The name of the file with the stacks of a rank."""
    return f"stacks-{attempt}-rank-{rank}.txt"


def last_heartbeat_event(folder: Folder) -> Event | None:
    """Returns, as an event, what the main rank of the last attempt said when it was last state; None if it never was.

    Args:
        folder: of the run.
    """
    with contextlib.suppress(StorageError, ValueError):
        beat = json.loads(watch_folder(folder).read(heartbeat_file(0)) or "null")
        if beat and "spent" in beat:
            return {"time": beat["spent"]["at"], "event": "last_heard", "spent": beat["spent"]}
    return None


class Watchdog:
    """The thread of one rank, from the beginning of the block to its end.

    Args:
        folder: of the run.
        rank: of this process.
        attempt: which one this is.
    """

    def __init__(self, folder: Folder, *, rank: int, attempt: int) -> None:
        self._folder, self._rank, self._attempt = watch_folder(folder), rank, attempt
        self._activity = Activity()
        self._trainer: Trainer[Any] | None = None
        self._beats = 0
        self._order = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headway-watchdog", daemon=True)

    def watch(self, trainer: Trainer[Any]) -> None:
        """Says from here on what this trainer does."""
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
            # A storage that fails for a while is the training's to complain of.
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
        """Writes the stacks of this process, if it was asked to, and ends it, if it was told to."""
        try:
            order = json.loads(self._folder.read(ORDER) or "null")
        except ValueError:
            return
        if not order or order["attempt"] != self._attempt or order["number"] <= self._order:
            return
        self._order = order["number"]
        with contextlib.suppress(StorageError):
            self._folder.write(stacks_file(self._attempt, self._rank), stacks(self._rank, order["why"]))
        if order["end"]:
            # Whatever the training thread waits for, in Python or in a collective, will not come.
            os._exit(1)


def stacks(rank: int, why: str) -> str:
    """Returns where every thread of this process is."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"rank {rank}, process {os.getpid()} on {socket.gethostname()}, {time.strftime('%Y-%m-%d %H:%M:%S')}: {why}"
    ]
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            parts.append(f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}")
    return "\n\n".join(parts)
