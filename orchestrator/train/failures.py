"""How a worker group failed, and whether to retry. The policy is pure; Ray Train acts on it.

It distinguishes what Ray cannot: errors of the user's code, crashes and preemptions, each with its own budget, and
errors that would recur.
"""

from __future__ import annotations

import os
import re
import socket
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray.train import UserCallback

from headway.trainer.errors import CheckpointError, ResumeError

from ..errors import StorageError
from ..runs.requests import read_stop_request
from ..storage.events import Event, EventWriter, read_events
from ..storage.folder import Folder, retry_storage
from .elastic import RESIZING
from .preemption import count_endings

# By module of the trainer, or by a function in it.
_PHASES = {
    "trainer": "setting up",
    "trainer.fit": "between two steps",  # calls the loop, also a custom one of the user's
    "session.__enter__": "setting up",
    "session.restore": "saving or restoring",
    "setup.build": "setting up",
    "distributed.parallelize": "setting up",
    "setup.weight_init": "setting up",
    "loop.run_state": "saving or restoring",
    "checkpoints.store": "saving or restoring",
    "checkpoints.reader": "saving or restoring",
    "checkpoints.snapshot": "saving or restoring",
    "checkpoints.background": "saving or restoring",
    "setup.init_from": "saving or restoring",
    "loop.loop": "between two steps",
    "loop.loop._global_batches": "reading data",
    "metrics.train_log": "logging",
    "data.dataloader_stream": "reading data",
    "data.iterable_stream": "reading data",
    "step.optimizer_step": "training step",
    "loop.evaluation": "evaluation",
    "callbacks.base": "callback",
}
# Before the group has announced itself: no user code has run yet.
_STARTING = "starting"
_RAISED_IN = "raised in process"
_LOST_PEER = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|socket", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How an attempt failed, in the rank that failed first.

    Attributes:
        attempt: its number.
        rank: the rank that failed; None if unknown.
        step: completed updates at the failure; None before training began.
        began_at: the step from which the attempt trained.
        kind: class name of the exception; empty if the process died.
        phase: what the rank was doing, if known.
        message, traceback: of the exception.
        retryable: False if the error would only recur.
        secondary: whether the exception only reports that another rank is gone.
        hung: description of a hang, if the attempt was ended for one.
    """

    attempt: int
    rank: int | None
    step: int | None = None
    began_at: int | None = None
    kind: str = ""
    phase: str = ""
    message: str = ""
    traceback: str = ""
    retryable: bool = True
    secondary: bool = False
    hung: str = ""

    @property
    def is_user_error(self) -> bool:
        """Whether training code raised it: not a dead process, a failed start, a lost peer or a lost storage."""
        is_other = self.secondary or self.kind == StorageError.__name__ or self.phase == _STARTING
        return bool(self.kind) and not is_other

    def __str__(self) -> str:
        if self.hung:
            return self.hung
        who = "a worker" if self.rank is None else f"the worker of rank {self.rank}"
        where = "" if self.step is None else f" at step {self.step}"
        where += f" ({self.phase})" if self.phase else ""
        if not self.kind:
            return f"{who} died{where}"
        return f"{who} raised {self.kind}{where}: {self.message}"


def is_fatal_error(error: BaseException) -> bool:
    """Return whether an error would recur, judging by its class: Headway's own concern the config, data or numbers.

    Failed writes of a checkpoint or an event are retried; a checkpoint that belongs to another run is not.
    """
    # By module, not by class: headway.datasets has its own errors, and not every run needs to import it.
    is_ours = type(error).__module__.startswith("headway.")
    return is_ours and (not isinstance(error, (CheckpointError, StorageError)) or isinstance(error, ResumeError))


def is_secondary(error: BaseException) -> bool:
    """Return whether an error only reports that another rank is gone."""
    is_torch = type(error).__module__.startswith("torch.distributed") or type(error) in (RuntimeError, ConnectionError)
    return is_torch and bool(_LOST_PEER.search(f"{type(error).__name__} {error}"))


def last_attempt(events: Sequence[Event]) -> int:
    """Return the number of the last attempt that announced itself; 0 if none has."""
    return max((event["attempt"] for event in events if event["event"] == "attempt_started"), default=0)


def last_failure(events: Sequence[Event], gone: Mapping[int, str] | None = None) -> Failure | None:
    """Return the first failure of the last attempt, preferring causes to errors that another rank's end caused.

    Args:
        events: of the run, earliest first.
        gone: Ray's message for each rank whose process is gone.
    """
    attempt = last_attempt(events)
    for event in events:
        if event["event"] == "rank_hung" and event["attempt"] == attempt:
            # The driver ended the attempt for it, so later errors of the ranks are consequences.
            return Failure(
                attempt=attempt,
                rank=event["ranks"][0] if len(event["ranks"]) == 1 else None,
                step=event["step"],
                phase=event["phase"],
                hung=f"{event['text']}; the stacks of all ranks that could write them: {event['stacks']}",
            )
    raised = [event for event in events if event["event"] == "rank_failed" and event["attempt"] == attempt]
    causes = [event for event in raised if not event["secondary"]]
    silent = {rank: text for rank, text in (gone or {}).items() if rank not in {event["rank"] for event in raised}}
    if not causes and silent:
        rank = min(silent)
        return Failure(attempt=attempt, rank=rank, message=silent[rank])
    if not raised:
        return None
    first = (causes or raised)[0]
    return Failure(
        attempt=attempt,
        rank=first["rank"],
        step=first["step"],
        began_at=first["began_at"],
        kind=first["type"],
        phase=first.get("phase", ""),
        message=first["message"],
        traceback=first["traceback"],
        retryable=first["retryable"],
        secondary=first["secondary"],
    )


def has_left_to_resize(events: Sequence[Event]) -> bool:
    """Return whether the last attempt saved and exited so that the next one can have more workers."""
    # By its number: the main ranks of two attempts may be on hosts whose clocks differ.
    attempt = last_attempt(events)
    ended = [event for event in events if event["event"] == "attempt_ended" and event["attempt"] == attempt]
    return bool(ended) and ended[-1].get("status") == RESIZING


def would_recur(failure: Failure, before: Sequence[Failure]) -> bool:
    """Return whether a failure would recur, so that retries are useless.

    A dead process, lost peers and a lost storage are retried. An exception is retried if the run got further than at
    the previous exception and than the step from which the attempt began; otherwise its cause is permanent.

    Args:
        failure: the failure to decide on.
        before: earlier failures of the same start.
    """
    if not failure.retryable:
        return True
    if not failure.is_user_error:
        return False
    if failure.step is None:
        return True
    furthest = max([each.step for each in before if each.is_user_error and each.step is not None], default=-1)
    return failure.step <= max(furthest, failure.began_at or 0)


def exceeds_budget(failure: Failure, before: Sequence[Failure], *, max_failures: int, max_errors: int) -> bool:
    """Return whether no retry is left for a failure of its kind: a user error, or anything else.

    Args:
        failure: the failure to decide on.
        before: earlier failures of the same start, of both kinds; preemptions are not among them.
        max_failures: retries for crashes, hangs and lost peers or storage.
        max_errors: retries for user errors.
    """
    of_its_kind = 1 + sum(each.is_user_error == failure.is_user_error for each in before)
    return of_its_kind > (max_errors if failure.is_user_error else max_failures)


def phase_of(error: BaseException) -> str:
    """Return what a rank was doing when it raised, by the innermost frame of the trainer in the traceback."""
    phase = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if module.startswith("headway.datasets."):
            phase = "reading data"
        elif module.startswith("headway.trainer."):
            file = module.removeprefix("headway.trainer.")
            phase = _PHASES.get(f"{file}.{frame.f_code.co_name}") or _PHASES.get(file, phase)
    return phase


class RetriesExhausted(Exception):
    """Raised in Ray Train's controller to end its retries; carries the worker's exception to the driver."""

    @property
    def raised(self) -> BaseException | None:
        """The exception of the worker that failed first, if there is one."""
        return self.args[1] if len(self.args) > 1 else None


class RetryPolicy(UserCallback):  # type: ignore[misc]
    """Records each failure of a group and ends useless retries; a callback in Ray Train's controller.

    Args:
        run_dir: path or URI of the run's folder.
        start: the lease of the driver, which is in all events of its start.
        max_failures: retries after crashes.
        max_errors: retries after user errors.
        max_preemptions: retries after preemptions; None: any number.
    """

    def __init__(
        self, run_dir: str, *, start: str, max_failures: int, max_errors: int, max_preemptions: int | None = None
    ) -> None:
        self._run_dir, self._start = run_dir, start
        self._max_failures, self._max_errors, self._max_preemptions = max_failures, max_errors, max_preemptions
        self._failures: list[Failure] = []
        self._decided: set[int] = set()
        self._seen: set[str] = set()

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Decide, once per group: Ray Train repeats this call while it waits for a machine to go.

        Raises:
            RetriesExhausted: Ray Train does not retry an error that a callback raises.
        """
        attempt = last_attempt(self._events())
        failed = {_failed_process(error) or f"attempt {attempt}: {error!r}" for error in worker_exceptions.values()}
        is_repeated = bool(failed & self._seen)
        self._seen |= failed
        if not is_repeated:
            self.decide(worker_exceptions)

    def decide(self, errors: Mapping[int, BaseException]) -> None:
        """Record a failure, and decide whether there is another attempt.

        Args:
            errors: Ray's errors of the group, by rank.

        Raises:
            RetriesExhausted: there is no other attempt.
        """
        folder, events = Folder(self._run_dir), self._events()
        attempt = last_attempt(events)
        has_announced_itself = attempt > 0 and attempt not in self._decided
        self._decided.add(attempt)
        if not has_announced_itself:
            failure = startup_failure(attempt, errors)
        elif has_left_to_resize(events):
            return
        else:
            gone = {rank: str(error).strip().splitlines()[-1][:300] for rank, error in errors.items() if str(error)}
            found = last_failure(events, {**dict.fromkeys(errors, ""), **gone})
            failure = found or startup_failure(attempt, errors)
        asked = read_stop_request(folder)
        gives_up = bool(asked and asked.abort)
        preempted = was_preempted(failure, events if has_announced_itself else (), errors)
        if preempted:
            gives_up |= self._max_preemptions is not None and count_endings(events)[0] >= self._max_preemptions
        else:
            gives_up |= would_recur(failure, self._failures) or exceeds_budget(
                failure, self._failures, max_failures=self._max_failures, max_errors=self._max_errors
            )
            self._failures.append(failure)
        log = EventWriter(folder, "controller", start=self._start)
        retry_storage(
            lambda: log.add(
                "group_failed",
                attempt=failure.attempt,
                rank=failure.rank,
                step=failure.step,
                text=f"preempted: {failure}" if preempted else str(failure),
                preempted=preempted,
                detail="" if failure.kind else failure.message,
                retrying=not gives_up,
            )
        )
        if gives_up:
            raised = errors.get(-1 if failure.rank is None else failure.rank)
            raise RetriesExhausted(str(failure), raised)

    def _events(self) -> list[Event]:
        """Return the events of this start."""
        events = retry_storage(lambda: read_events(Folder(self._run_dir)))
        return [event for event in events if event.get("start") == self._start]


def startup_failure(attempt: int, errors: Mapping[int, BaseException]) -> Failure:
    """Return how a group failed before it announced itself, from Ray's errors alone.

    Args:
        attempt: the last attempt that announced itself, or 0.
        errors: by rank.
    """
    rank, error = min(errors.items(), key=lambda each: (is_secondary(each[1]), each[0]))
    lines = str(error).strip().splitlines()
    # Ray's own error means that the process is gone.
    is_gone = type(error).__module__.startswith("ray.")
    return Failure(
        attempt=attempt,
        rank=rank,
        kind="" if is_gone else type(error).__name__,
        phase=_STARTING,
        message="\n".join(lines[-1:])[:300] if is_gone else str(error),
        retryable=not is_fatal_error(error),
        secondary=is_secondary(error),
    )


def name_process(error: BaseException) -> None:
    """Note on an error which process raised it, so that the controller can tell one group from the next."""
    error.add_note(f"{_RAISED_IN} {os.getpid()} on {socket.gethostname()} at {time.time_ns()}")


def _failed_process(error: BaseException) -> str | None:
    """Return an id of the process that died or raised, equal each time the error is reported; None if unknown."""
    gone: str | None = getattr(getattr(error, "health_check_failure", None), "actor_id", None)
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(_RAISED_IN)]
    return gone or (notes[-1] if notes else None)


def was_preempted(failure: Failure, events: Sequence[Event], errors: Mapping[int, BaseException]) -> bool:
    """Return whether an attempt ended by preemption.

    Args:
        failure: the failure of the attempt.
        events: of the run. After a notice any failure but a user error counts as preemption: a rank may lose its peer
            before Ray notices that the machine is gone.
        errors: Ray's errors, by rank.
    """
    if any(getattr(getattr(error, "health_check_failure", error), "preempted", False) for error in errors.values()):
        return True
    noticed = {event["attempt"] for event in events if event["event"] == "preemption_notice"}
    return failure.attempt in noticed and not failure.is_user_error and not failure.hung
