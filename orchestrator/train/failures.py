"""What went wrong in a worker group, and whether trying again can help. Deciding is arithmetic; Ray Train acts.

What is decided here is what Ray cannot know: whether the code failed, or the machine, or whether the machine was taken
away, each with a budget of its own, and that an error would come again.
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

# By file, or by a function in it.
_PHASES = {
    "trainer": "setting up",
    "setup.build": "setting up",
    "distributed.parallelize": "setting up",
    "setup.weight_init": "setting up",
    "loop.run_state": "saving or restoring",
    "checkpoints.store": "saving or restoring",
    "checkpoints.snapshot": "saving or restoring",
    "checkpoints.background": "saving or restoring",
    "setup.init_from": "saving or restoring",
    "loop.loop": "between two steps",  # also a loop of the user's own
    "loop.loop._global_batches": "reading data",
    "metrics.train_log": "logging",
    "data.dataloader_stream": "reading data",
    "data.iterable_stream": "reading data",
    "step.optimizer_step": "training step",
    "loop.evaluation": "evaluation",
    "callbacks.base": "callback",
}
# Before the group has said that it is there: nothing of the user's has run yet.
_STARTING = "starting"
_RAISED_IN = "raised in process"
_LOST_PEER = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|socket", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How an attempt failed, in the rank that failed first.

    Attributes:
        attempt: which one.
        rank: of the worker, or None where nobody can tell.
        step: completed updates at that time; None before training began.
        began_at: the step from which the attempt trained.
        kind: the class of the exception; empty if the process was gone.
        phase: what the rank was doing, as far as that is known.
        message, traceback: of the exception.
        retryable: False if the error would only recur.
        secondary: whether the exception only reports that another rank is gone.
        hung: what the ranks that hung did instead, where it was that.
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
        """Whether the code that trains raised it; not one that died, was starting, or lost its peers or storage."""
        is_another = self.secondary or self.kind == StorageError.__name__ or self.phase == _STARTING
        return bool(self.kind) and not is_another

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
    """Whether an error says by its class that it would come again: ours are about the config, the data or the numbers.

    What could not be written, a checkpoint or an event, may well be written the next time; a checkpoint of another run
    stays that.
    """
    # By module, not by class: headway.datasets has errors of its own, and not every run needs to import it.
    is_ours = type(error).__module__.startswith("headway.")
    return is_ours and (not isinstance(error, (CheckpointError, StorageError)) or isinstance(error, ResumeError))


def is_secondary(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone."""
    is_torch = type(error).__module__.startswith("torch.distributed") or type(error) in (RuntimeError, ConnectionError)
    return is_torch and bool(_LOST_PEER.search(f"{type(error).__name__} {error}"))


def last_attempt(events: Sequence[Event]) -> int:
    """Returns the number of the last group that has said that it was there; 0 if none has."""
    return max((event["attempt"] for event in events if event["event"] == "attempt_started"), default=0)


def last_failure(events: Sequence[Event], gone: Mapping[int, str] | None = None) -> Failure | None:
    """Returns the first failure of the last attempt; errors that another rank's end brought about come last.

    Args:
        events: of the run, the earliest first.
        gone: what Ray says of the ranks whose process is gone.
    """
    attempt = last_attempt(events)
    for event in events:
        if event["event"] == "rank_hung" and event["attempt"] == attempt:
            # The driver has ended the attempt for it: whatever the ranks said while they were ended comes from that.
            return Failure(
                attempt=attempt,
                rank=event["ranks"][0] if len(event["ranks"]) == 1 else None,
                step=event["step"],
                phase=event["phase"],
                hung=f"{event['text']}; the stacks of all ranks that could write them: {event['stacks']}",
            )
    raised = [event for event in events if event["event"] == "rank_failed" and event["attempt"] == attempt]
    causes = [event for event in raised if not event["collateral"]]
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
        retryable=not first["hopeless"],
        secondary=first["collateral"],
    )


def has_left_to_resize(events: Sequence[Event]) -> bool:
    """Whether the last attempt has ended, with all saved, so that another one of more workers can go on."""
    last = [event for event in events if event["event"] in ("attempt_started", "attempt_ended")][-1:]
    return bool(last) and last[0].get("status") == RESIZING


def would_recur(failure: Failure, before: Sequence[Failure]) -> bool:
    """Whether to give up although there are retries left.

    A process that died, or lost its peers or the storage, is tried again. An exception is tried again if the run has
    got further than at the exception before it, and further than where it began: otherwise it has a cause that stays.

    Args:
        failure: the one to decide on.
        before: earlier ones of the same start.
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
    """Whether there is no retry left for a failure of its sort: exceptions of the code, or everything else.

    Args:
        failure: the one to decide on.
        before: earlier ones of the same start, of both sorts; machines that were taken away are not among them.
        max_failures: how many of everything else are tried again.
        max_errors: how many exceptions are.
    """
    of_its_sort = 1 + sum(each.is_user_error == failure.is_user_error for each in before)
    return of_its_sort > (max_errors if failure.is_user_error else max_failures)


def phase_of(error: BaseException) -> str:
    """Says what a rank was doing when it raised, by the innermost file of the trainer in the traceback."""
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
    """Ends Ray Train's retries, from its controller, and brings the driver what a worker raised."""

    @property
    def raised(self) -> BaseException | None:
        """The exception of the worker that failed first."""
        return self.args[1] if len(self.args) > 1 else None


class RetryPolicy(UserCallback):  # type: ignore[misc]
    """Runs in Ray Train's controller: writes each failure of the group down, and ends retries that are no use.

    Args:
        run_dir: of the run.
        since: when this start of the run began, in seconds since 1970.
        max_failures: how often workers may crash.
        max_errors: how often they may raise.
        max_preemptions: how often machines may be taken away; None: any number.
    """

    def __init__(
        self, run_dir: str, *, since: float, max_failures: int, max_errors: int, max_preemptions: int | None = None
    ) -> None:
        self._run_dir, self._since = run_dir, since
        self._max_failures, self._max_errors, self._max_preemptions = max_failures, max_errors, max_preemptions
        self._failures: list[Failure] = []
        self._judged: set[int] = set()
        self._told: set[str] = set()

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Decides, once per group. Ray Train tells of one again and again while it waits for a machine to go.

        Raises:
            RetriesExhausted: Ray Train takes what a callback raises for an error that is not to be retried.
        """
        attempt = last_attempt(self._events())
        told = {_of_process(error) or f"attempt {attempt}: {error!r}" for error in worker_exceptions.values()}
        is_again = bool(told & self._told)
        self._told |= told
        if not is_again:
            self.decide(worker_exceptions)

    def decide(self, errors: Mapping[int, BaseException]) -> None:
        """Decides whether there is another attempt.

        Args:
            errors: by rank, what Ray has of a group that has not been decided on.

        Raises:
            RetriesExhausted: there is none.
        """
        folder, events = Folder(self._run_dir), self._events()
        attempt = last_attempt(events)
        has_announced_itself = attempt > 0 and attempt not in self._judged
        self._judged.add(attempt)
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
        log = EventWriter(folder, "controller")
        retry_storage(
            lambda: log.add(
                "group_failed",
                attempt=failure.attempt,
                rank=failure.rank,
                step=failure.step,
                text=f"machines were taken away: {failure}" if preempted else str(failure),
                preempted=preempted,
                detail="" if failure.kind else failure.message,
                hopeless=gives_up,
            )
        )
        if gives_up:
            raised = errors.get(-1 if failure.rank is None else failure.rank)
            raise RetriesExhausted(str(failure), raised)

    def _events(self) -> list[Event]:
        """Those of this start. Storage that is away comes back, or is a failure of its own."""
        events = retry_storage(lambda: read_events(Folder(self._run_dir)))
        return [event for event in events if event["time"] >= self._since]


def startup_failure(attempt: int, errors: Mapping[int, BaseException]) -> Failure:
    """Returns how a group failed before it had said that it was there: what Ray has of it is all there is.

    Args:
        attempt: the last one that did say so, or 0.
        errors: by rank.
    """
    rank, error = min(errors.items(), key=lambda each: (is_secondary(each[1]), each[0]))
    lines = str(error).strip().splitlines()
    # Of a process that is gone the error is Ray's own.
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
    """Notes on an error which process raised it, by which Ray Train's controller tells one group from the next."""
    error.add_note(f"{_RAISED_IN} {os.getpid()} on {socket.gethostname()} at {time.time_ns()}")


def _of_process(error: BaseException) -> str | None:
    """Which process has died or raised an error, the same however often that is told; None where it does not say."""
    gone: str | None = getattr(getattr(error, "health_check_failure", None), "actor_id", None)
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(_RAISED_IN)]
    return gone or (notes[-1] if notes else None)


def was_preempted(failure: Failure, events: Sequence[Event], errors: Mapping[int, BaseException]) -> bool:
    """Whether an attempt ended because machines were taken away.

    Args:
        failure: of the attempt.
        events: of the run. After a notice, what is no error of the code comes from it: a rank may miss its peer before
            Ray misses the machine.
        errors: by rank, what Ray has.
    """
    if any(getattr(getattr(error, "health_check_failure", error), "preempted", False) for error in errors.values()):
        return True
    noticed = {event["attempt"] for event in events if event["event"] == "preemption_notice"}
    return failure.attempt in noticed and not failure.is_user_error and not failure.hung
