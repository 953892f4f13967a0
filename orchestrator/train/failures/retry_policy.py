"""Retries of a failed worker group; Ray Train carries them out.

It distinguishes what Ray cannot: errors of the user's code, crashes, lost machines and preemptions, each with its own
budget (budget.py), and the first cause from what it made fail elsewhere (cause.py).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import ray
from ray.train import UserCallback

from headway.trainer.metrics.units import human_duration

from ...cluster.nodes import usable_nodes
from ...config.scaling import Scaling
from ...runs.requests import read_stop_request
from ...storage.events import Event, EventWriter, read_events
from ...storage.folder import Folder, retry_storage
from ..elastic import RAY_LEARNS_S, RESIZING, is_sized_by_driver, slots
from ..preemption import count_endings
from .budget import (
    Failure,
    exceeds_budget,
    failures_since_refill,
    nodes_to_avoid,
    restart_delay_s,
    would_recur,
)
from .cause import find_cause, last_attempt, startup_failure

_RAISED_IN = "raised in process"


def has_left_to_resize(events: Sequence[Event]) -> bool:
    """Return whether the last attempt saved and exited so that the next one can have more workers."""
    # By its number: the main ranks of two attempts may be on hosts whose clocks differ.
    attempt = last_attempt(events)
    ended = [event for event in events if event["event"] == "attempt_ended" and event["attempt"] == attempt]
    return bool(ended) and ended[-1].get("status") == RESIZING


class RetriesExhausted(Exception):
    """Raised in Ray Train's controller to end its retries; carries the worker's exception to the driver."""

    @property
    def raised(self) -> BaseException | None:
        """The exception of the worker that failed first, if there is one."""
        return self.args[1] if len(self.args) > 1 else None


@dataclass(frozen=True, kw_only=True)
class Restart:
    """How to restart a failed group.

    Attributes:
        delay_s: how long to wait first.
        avoid: ids of the nodes to keep the workers off.
    """

    delay_s: float = 0.0
    avoid: frozenset[str] = frozenset()


class RestartRequired(Exception):
    """Raised in Ray Train's controller to end it, because the next group starts later or on other nodes.

    Ray Train can neither wait with its resources released nor change the placement of a running `TorchTrainer`.
    """

    @property
    def restart(self) -> Restart:
        """How the driver is to restart the workers."""
        restart: Restart = self.args[0]
        return restart


class RetryPolicy(UserCallback):  # type: ignore[misc]
    """Records each failure of a group and decides on retries; a callback in Ray Train's controller.

    Its memory is the run's events, because a restart may be in another controller.

    Args:
        run_dir: path or URI of the run's folder.
        start: the lease of the driver, which is in all events of its start.
        max_failures: retries after crashes.
        max_errors: retries after user errors.
        max_preemptions: retries after preemptions; None: any number.
        max_lost_nodes: retries after machines were lost without notice; None: any number.
        scaling: the workers; None: nodes are not avoided.
        avoided: ids of the nodes that the group keeps off.
    """

    def __init__(
        self,
        run_dir: str,
        *,
        start: str,
        max_failures: int,
        max_errors: int,
        max_preemptions: int | None = None,
        max_lost_nodes: int | None = None,
        scaling: Scaling | None = None,
        avoided: Collection[str] = (),
    ) -> None:
        self._run_dir, self._start = run_dir, start
        self._max_failures, self._max_errors = max_failures, max_errors
        self._max_preemptions, self._max_lost_nodes = max_preemptions, max_lost_nodes
        self._scaling, self._avoided = scaling, frozenset(avoided)
        self._decided: set[int] = set()
        self._seen: set[str] = set()

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Decide, once per group: Ray Train repeats this call while it waits for a machine to go.

        Raises:
            RetriesExhausted: Ray Train does not retry an error that a callback raises.
            RestartRequired: the driver restarts the workers.
        """
        attempt = last_attempt(self._events())
        failed = {_failed_process(error) or f"attempt {attempt}: {error!r}" for error in worker_exceptions.values()}
        is_repeated = bool(failed & self._seen)
        self._seen |= failed
        if is_repeated:
            return
        restart = self.decide(worker_exceptions)
        if restart.delay_s or restart.avoid != self._avoided or self._is_sized_by_driver(self._avoided):
            raise RestartRequired(restart)

    def decide(self, errors: Mapping[int, BaseException]) -> Restart:
        """Record a failure, and return how to restart.

        Args:
            errors: Ray's errors of the group, by rank.

        Raises:
            RetriesExhausted: there is no other attempt.
        """
        folder, events = Folder(self._run_dir), self._events()
        attempt, before = last_attempt(events), past_failures(events)
        decided = self._decided | {event["attempt"] for event in events if event["event"] == "group_failed"}
        has_announced_itself = attempt > 0 and attempt not in decided
        self._decided.add(attempt)
        if not has_announced_itself:
            failure = startup_failure(attempt, errors)
        elif has_left_to_resize(events):
            return Restart(avoid=self._avoided)
        else:
            failure = find_cause(events, errors, folder)
            # Again, because a notice or an error may have been written meanwhile.
            events = self._events()
        asked = read_stop_request(folder)
        gives_up = bool(asked and asked.abort)
        preempted = was_preempted(failure, events if has_announced_itself else (), errors)
        restart, hint, reason = Restart(avoid=self._avoided), "", ""
        if preempted:
            gives_up |= self._max_preemptions is not None and count_endings(events)[0] >= self._max_preemptions
        else:
            window = failures_since_refill([*before, failure])[:-1]
            recurs = would_recur(failure, before, has_other_nodes=self._has_room_beside({failure.node_id}))
            exhausted = exceeds_budget(
                failure, window, max_failures=self._max_failures, max_errors=self._max_errors,
                max_lost_nodes=self._max_lost_nodes,
            )  # fmt: skip
            gives_up |= recurs or exhausted
            reason = _reason(failure, recurs=recurs, exhausted=exhausted)
            avoid, hint = self._avoid([*window, failure])
            restart = Restart(delay_s=restart_delay_s(failure, window), avoid=avoid)
        if self._is_sized_by_driver(restart.avoid) and (preempted or not failure.is_user_error):
            # Ray may not have noticed yet that the machine is gone, and the group would be sized with it.
            restart = replace(restart, delay_s=max(restart.delay_s, RAY_LEARNS_S))
        told = {"last_words": failure.last_words} if failure.last_words else {}
        log = EventWriter(folder, "controller", start=self._start)
        retry_storage(
            lambda: log.add(
                "group_failed",
                attempt=failure.attempt,
                rank=failure.rank,
                step=failure.step,
                text=f"preempted: {failure}" if preempted else str(failure),
                preempted=preempted,
                retrying=not gives_up,
                next=reason if gives_up else _describe_restart(restart, hint),
                failure={**asdict(failure), "traceback": ""},
                **told,
            )
        )
        if gives_up:
            raised = errors.get(-1 if failure.rank is None else failure.rank)
            raise RetriesExhausted(str(failure), raised)
        return restart

    def _avoid(self, window: Sequence[Failure]) -> tuple[frozenset[str], str]:
        """Return the nodes to keep the workers off, and text on that."""
        avoid = nodes_to_avoid(window)
        if not avoid:
            return frozenset(), ""
        hosts = ", ".join(sorted({each.host for each in window if each.node_id in avoid}))
        if self._has_room_beside(avoid):
            return frozenset(avoid), f", not on {hosts}, where workers died twice without progress"
        return frozenset(), f" (workers died twice on {hosts}, which is used again: the other nodes have no room)"

    def _is_sized_by_driver(self, avoided: Collection[str]) -> bool:
        return self._scaling is not None and is_sized_by_driver(self._scaling, avoided)

    def _has_room_beside(self, nodes: Collection[str]) -> bool:
        return self._scaling is not None and slots_beside(nodes, self._scaling) >= self._scaling.min_workers

    def _events(self) -> list[Event]:
        """Return the events of this start."""
        events = retry_storage(lambda: read_events(Folder(self._run_dir)))
        return [event for event in events if event.get("start") == self._start]


def slots_beside(nodes: Collection[str], scaling: Scaling) -> int:
    """Return how many workers fit on the live nodes other than these, by their ids."""
    if not ray.is_initialized():
        return 0
    return slots((each["Resources"] for each in usable_nodes(scaling) if each["NodeID"] not in nodes), scaling)


def past_failures(events: Sequence[Event]) -> list[Failure]:
    """Return the failures that the policy has recorded, earliest first, without preemptions."""
    recorded = [event for event in events if event["event"] == "group_failed" and not event.get("preempted")]
    return [failure_of(event) for event in recorded if "failure" in event]


def failure_of(event: Event) -> Failure:
    """Return the failure of a "group_failed" event."""
    return Failure(**{**event["failure"], "lost_ranks": tuple(event["failure"]["lost_ranks"])})


def _describe_restart(restart: Restart, hint: str) -> str:
    when = f" in {human_duration(restart.delay_s)}" if restart.delay_s else ""
    return f"restarting the workers{when}{hint}"


def _reason(failure: Failure, *, recurs: bool, exhausted: bool) -> str:
    """Return why there is no other attempt, for a failure that is retried in principle."""
    if recurs and failure.is_death:
        return "not retried: a process died at this step before, without progress in between"
    if recurs or not exhausted:
        return ""
    setting = {"error": "max_errors", "crash": "max_failures", "machine": "max_lost_nodes"}[failure.budget]
    return f"no retry is left (retries.{setting})"


def name_process(error: BaseException) -> None:
    """Note on an error which process raised it, so that the controller can tell one group from the next."""
    error.add_note(f"{_RAISED_IN} {os.getpid()} on {socket.gethostname()} at {time.time_ns()}")


def _failed_process(error: BaseException) -> str | None:
    """Return an id of the process that died or raised, equal each time the error is reported; None if unknown."""
    gone: str | None = getattr(_death_of(error), "actor_id", None)
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(_RAISED_IN)]
    return gone or (notes[-1] if notes else None)


def _death_of(error: BaseException) -> BaseException:
    """Return Ray's error for the actor of a dead worker, or the error itself.

    Ray Train wraps it in an error of its own, which is not public. If that changes, failures of one group may count
    several times, and a preemption without notice counts as a failure.
    """
    death: BaseException = getattr(error, "health_check_failure", error)
    return death


def was_preempted(failure: Failure, events: Sequence[Event], errors: Mapping[int, BaseException]) -> bool:
    """Return whether an attempt ended by preemption.

    Args:
        failure: the failure of the attempt.
        events: of the run. After a notice any failure but a user error counts as preemption: a rank may lose its peer
            before Ray notices that the machine is gone.
        errors: Ray's errors, by rank.
    """
    if any(getattr(_death_of(error), "preempted", False) for error in errors.values()):
        return True
    noticed = {event["attempt"] for event in events if event["event"] == "preemption_notice"}
    return failure.attempt in noticed and not failure.is_user_error and not failure.hung
