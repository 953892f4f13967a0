"""Preemption: Ray's notice that machines will be taken away, and whether there is time to save before.

`ray.train.get_preemption_info` is the only public source of the notice, and it is a barrier over all ranks. Each rank
therefore polls in its own thread, off the path of a step, and these threads wait for one another.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray.train

from ..storage.events import Event

POLL_S = 2.0
# The last save's duration is an estimate, and a machine may be taken early.
_MARGIN = 1.5


@dataclass(frozen=True, kw_only=True)
class PreemptionNotice:
    """Ray's notice that machines will be preempted.

    Attributes:
        nodes: their node ids in Ray.
        ranks: the ranks on them.
        deadline: when they are taken, in seconds since 1970; None if unknown.
    """

    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    deadline: float | None


class PreemptionListener:
    """Polls for notices in a thread. Every rank must create one; nothing else may use Ray Train's collectives.

    Args:
        handle: called in the thread with each notice that names a new node.
        poll_s: seconds between two polls.
    """

    def __init__(self, handle: Callable[[PreemptionNotice], None], *, poll_s: float | None = None) -> None:
        self._handle, self._poll_s = handle, POLL_S if poll_s is None else poll_s
        self._ended = threading.Event()
        threading.Thread(target=self._listen, name="headway-preemption", daemon=True).start()

    def end(self) -> None:
        """Stop polling. A poll that waits for other ranks is abandoned."""
        self._ended.set()

    def _listen(self) -> None:
        known: set[str] = set()
        while not self._ended.wait(self._poll_s):
            try:
                info = ray.train.get_preemption_info()
            except Exception:
                # The group is being shut down, or other code used Ray Train's collectives: no notices from here on.
                return
            if info is not None and not set(info.preempted_node_ids) <= known:
                known |= set(info.preempted_node_ids)
                try:
                    self._handle(notice_of(info))
                except Exception as error:
                    # The thread must survive for the next notice. The warning is written to the storage, and may fail.
                    with contextlib.suppress(Exception):
                        message = f"a preemption notice could not be handled: {type(error).__name__}: {error}"
                        warnings.warn(message, stacklevel=2)


def notice_of(info: Any) -> PreemptionNotice:
    """Convert a `ray.train.PreemptionInfo`."""
    return PreemptionNotice(
        nodes=tuple(info.preempted_node_ids),
        ranks=tuple(info.preempted_ranks),
        deadline=None if info.deadline_ms is None else info.deadline_ms / 1000,
    )


def has_time_to_save(left_s: float | None, save_s: float | None) -> bool:
    """Return whether a checkpoint started now is expected to be committed in time.

    Args:
        left_s: seconds until the machine is taken; None if unknown.
        save_s: seconds that the last checkpoint took until its commit; None if there was none.
    """
    return left_s is None or left_s > _MARGIN * (save_s or 0.0)


def count_endings(events: Sequence[Event]) -> tuple[int, int]:
    """Return how many attempts of a run ended by preemption, and how many by a failure."""
    last = max((event["attempt"] for event in events if event["event"] == "attempt_started"), default=0)
    # An attempt may appear several times: groups that failed before they could announce themselves.
    failed = [(event["attempt"], bool(event.get("preempted"))) for event in events if event["event"] == "group_failed"]
    # At the deadline Ray ends the group itself, without a failure.
    left = {
        event["attempt"]
        for event in events
        if event["event"] == "preemption_notice" and event["attempt"] < last and event["attempt"] not in dict(failed)
    }
    preempted = sum(was_preempted for _, was_preempted in failed)
    return preempted + len(left), len(failed) - preempted
