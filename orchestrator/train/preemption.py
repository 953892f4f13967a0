"""Preemption: Ray's notice that machines will be taken away, and whether there is time to save before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..storage.events import Event

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
