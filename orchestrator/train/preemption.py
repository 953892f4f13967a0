"""Machines that are about to be taken away: Ray's notice, heard beside the training, and whether it leaves the time.

`ray.train.get_preemption_info` is the only public way to hear of it, and a barrier over all ranks. So each rank asks
in a thread of its own, as often as the others do and never on the path of a step: the threads wait for one another.
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
# A save takes longer where other ranks save as well, and a machine may go early.
_MARGIN = 1.5


@dataclass(frozen=True, kw_only=True)
class PreemptionNotice:
    """What Ray says of machines that will go.

    Attributes:
        nodes: their ids in Ray.
        ranks: that they hold.
        deadline: when they go, in seconds since 1970; None where nobody knows.
    """

    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    deadline: float | None


class PreemptionListener:
    """Listens, from its making on. Every rank must make one, and only it may use Ray Train's collectives.

    Args:
        heed: is told of each notice that names a node which no earlier one had; in the thread.
        poll_s: seconds between two questions.
    """

    def __init__(self, heed: Callable[[PreemptionNotice], None], *, poll_s: float | None = None) -> None:
        self._heed, self._poll_s = heed, POLL_S if poll_s is None else poll_s
        self._ended = threading.Event()
        threading.Thread(target=self._listen, name="headway-preemption", daemon=True).start()

    def end(self) -> None:
        """Asks no more. A question that waits for other ranks is left to itself."""
        self._ended.set()

    def _listen(self) -> None:
        known: set[str] = set()
        while not self._ended.wait(self._poll_s):
            try:
                info = ray.train.get_preemption_info()
            except Exception:
                # The group is being taken down, or somebody else has used Ray Train's collectives: there is no notice.
                return
            if info is not None and not set(info.preempted_node_ids) <= known:
                known |= set(info.preempted_node_ids)
                try:
                    self._heed(notice_of(info))
                except Exception as error:
                    # The thread must live: there may be a next notice. The warning goes to the storage as well.
                    with contextlib.suppress(Exception):
                        warnings.warn(f"a notice was not heeded: {type(error).__name__}: {error}", stacklevel=2)


def notice_of(info: Any) -> PreemptionNotice:
    """Returns what a `ray.train.PreemptionInfo` says."""
    return PreemptionNotice(
        nodes=tuple(info.preempted_node_ids),
        ranks=tuple(info.preempted_ranks),
        deadline=None if info.deadline_ms is None else info.deadline_ms / 1000,
    )


def has_time_to_save(left_s: float | None, save_s: float | None) -> bool:
    """Whether a checkpoint that is begun now will be committed in time, as far as anybody knows.

    Args:
        left_s: until the machine goes; None if that is not known.
        save_s: what the last checkpoint took from its beginning to its commit; None if there was none.
    """
    return left_s is None or left_s > _MARGIN * (save_s or 0.0)


def count_endings(events: Sequence[Event]) -> tuple[int, int]:
    """Returns how many attempts of a run ended because machines were taken away, and how many by a failure."""
    last = max((event["attempt"] for event in events if event["event"] == "attempt_started"), default=0)
    # Several of one attempt: groups that failed before they could say that they were there.
    failed = [(event["attempt"], bool(event.get("preempted"))) for event in events if event["event"] == "group_failed"]
    # At the deadline Ray ends the group itself, and nobody fails.
    left = {
        event["attempt"]
        for event in events
        if event["event"] == "preemption_notice" and event["attempt"] < last and event["attempt"] not in dict(failed)
    }
    preempted = sum(was_preempted for _, was_preempted in failed)
    return preempted + len(left), len(failed) - preempted
