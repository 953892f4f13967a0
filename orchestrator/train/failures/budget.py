"""Whether, when and where a failed attempt is retried: pure rules, without Ray, files and clocks.

Failures are of three kinds, each with its own budget: exceptions in training code, crashes (dead processes, hangs, lost
peers or storage), and machines lost without notice. Preemptions with notice are not failures.

A budget is full again after progress: the rule is `has_refilled`. Restarts without progress wait longer each time, by
`restart_delay_s`. A node on which ranks died repeatedly without progress is avoided, by `nodes_to_avoid`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...errors import StorageError

REFILL_UPDATES = 1000
"""Updates beyond the furthest step of all earlier attempts after which the budgets are full again."""

REFILL_S = 3600.0
"""Seconds of training beyond that step after which the budgets are full again."""

STARTING = "starting"
"""Phase of a group that has not announced itself: no user code has run yet."""

# The first restart is immediate; then 5 s, 10 s, 20 s ... without progress, as Kubernetes restarts containers.
_FIRST_DELAY_S, _LONGEST_DELAY_S = 5.0, 300.0
_DEATHS_TO_AVOID = 2

FailureKind = Literal["error", "crash", "machine"]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How an attempt failed, in the rank that failed first.

    Attributes:
        attempt: its number.
        rank: the rank that failed; None if unknown.
        step: completed updates at the failure; None before training began.
        began_at: the step from which the attempt trained.
        trained_s: seconds from the start of training to the failure.
        kind: class name of the exception; empty if the process died.
        phase: what the rank was doing, if known.
        line: line of the user's code, such as "train.py:31 in training_step"; empty if unknown.
        message, traceback: of the exception.
        death: how the process died, such as "was killed by a segmentation fault (SIGSEGV)"; empty if unknown.
        host, node_id: of the rank; empty if unknown.
        lost_node: whether the machine is gone, with all its ranks.
        lost_ranks: the ranks on that machine.
        last_words: path of the file with the last output of the dead process; empty if there is none.
        retryable: False if the error would only recur.
        secondary: whether the exception only reports that another rank is gone.
        hung: description of a hang, if the attempt was ended for one.
    """

    attempt: int
    rank: int | None
    step: int | None = None
    began_at: int | None = None
    trained_s: float = 0.0
    kind: str = ""
    phase: str = ""
    line: str = ""
    message: str = ""
    traceback: str = ""
    death: str = ""
    host: str = ""
    node_id: str = ""
    lost_node: bool = False
    lost_ranks: tuple[int, ...] = ()
    last_words: str = ""
    retryable: bool = True
    secondary: bool = False
    hung: str = ""

    @property
    def is_user_error(self) -> bool:
        """Whether training code raised it: not a dead process, a failed start, a lost peer or a lost storage."""
        is_other = self.secondary or self.kind == StorageError.__name__ or self.phase == STARTING
        return bool(self.kind) and not is_other

    @property
    def is_death(self) -> bool:
        """Whether a process died on a machine that is still there."""
        return not (self.kind or self.lost_node or self.hung)

    @property
    def budget(self) -> FailureKind:
        """The budget that it counts toward."""
        return "error" if self.is_user_error else "machine" if self.lost_node else "crash"

    def __str__(self) -> str:
        """The cause in one sentence."""
        if self.hung:
            return self.hung
        where = "" if self.step is None else f" at step {self.step:,}"
        where += f" ({self.phase})" if self.phase else ""
        if self.lost_node:
            ranks = ", ".join(map(str, self.lost_ranks))
            return f"lost node {self.host or self.node_id} with rank{'s'[: len(self.lost_ranks) > 1]} {ranks}{where}"
        worker = "a worker" if self.rank is None else f"the worker of rank {self.rank}"
        worker += f" on {self.host}" if self.host else ""
        line = f", at {self.line}" if self.line else ""
        if not self.kind:
            return f"{worker} {self.death or 'died'}{where}{line}"
        if self.secondary:
            return (
                f"{worker} lost its connection to another worker{where}, although no worker is known to have died: "
                f"{self.message}"
            )
        said = _one_line(self.message)
        return f"{worker} raised {self.kind}{where}{line}{f': {said}' if said else ''}"


def _one_line(message: str) -> str:
    """Return a message as one line: the first, and the last if torch passes on the traceback of a loader's worker."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith("Caught "):
        return f"{lines[0].rstrip('.')}: {lines[-1]}"
    return lines[0] if lines else ""


def would_recur(failure: Failure, before: Sequence[Failure], *, has_other_nodes: bool = False) -> bool:
    """Return whether a failure would recur, so that retries are useless.

    Lost peers, machines and storages are retried. A process that dies at the same step as before, without progress in
    between, is not, unless both died on one node and there are others to run on. An exception is retried if the run
    got further than at the previous exception and than the step from which the attempt began; otherwise its cause is
    permanent.

    Args:
        failure: the failure to decide on.
        before: earlier failures of the same start.
        has_other_nodes: whether the other nodes have room for the workers.
    """
    if not failure.retryable:
        return True
    if failure.is_death and failure.step is not None:
        deaths = [each for each in before if each.is_death and each.step == failure.step]
        on_one_node = failure.node_id != "" and {each.node_id for each in deaths} == {failure.node_id}
        may_be_the_node = on_one_node and len(deaths) < _DEATHS_TO_AVOID and has_other_nodes
        return bool(deaths) and furthest_step(before) <= failure.step and not may_be_the_node
    if not failure.is_user_error:
        return False
    if failure.step is None:
        return True
    furthest = furthest_step([each for each in before if each.is_user_error])
    return failure.step <= max(furthest, failure.began_at or 0)


def furthest_step(failures: Sequence[Failure]) -> int:
    """Return the furthest step at which one of them happened; -1 if none is known."""
    return max((each.step for each in failures if each.step is not None), default=-1)


def has_refilled(failure: Failure, before: Sequence[Failure]) -> bool:
    """Return whether the attempt that failed made so much progress that all budgets are full again.

    Progress counts beyond the furthest step of the earlier failures: `REFILL_UPDATES` updates or `REFILL_S` seconds
    of training. Updates that repeat what an earlier attempt had done do not count.
    """
    if failure.step is None or not before:
        return False
    began_at = failure.began_at or 0
    fresh = failure.step - max(furthest_step(before), began_at)
    made = failure.step - began_at
    return fresh > 0 and (fresh >= REFILL_UPDATES or failure.trained_s * fresh / made >= REFILL_S)


def failures_since_refill(failures: Sequence[Failure]) -> list[Failure]:
    """Return the failures, earliest first, since the budgets were last full; the last one is always among them."""
    since = 0
    for number, failure in enumerate(failures):
        if has_refilled(failure, failures[:number]):
            since = number
    return list(failures[since:])


def exceeds_budget(
    failure: Failure,
    before: Sequence[Failure],
    *,
    max_failures: int,
    max_errors: int,
    max_lost_nodes: int | None = None,
) -> bool:
    """Return whether no retry is left for a failure of its kind.

    Args:
        failure: the failure to decide on.
        before: earlier failures since the budgets were full, of all kinds; preemptions are not among them.
        max_failures: retries for crashes, hangs and lost peers or storage.
        max_errors: retries for user errors.
        max_lost_nodes: retries for machines lost without notice; None: unlimited.
    """
    budget = {"error": max_errors, "crash": max_failures, "machine": max_lost_nodes}[failure.budget]
    of_its_kind = 1 + sum(each.budget == failure.budget for each in before)
    return budget is not None and of_its_kind > budget


def restart_delay_s(failure: Failure, before: Sequence[Failure]) -> float:
    """Return how long to wait before the restart: nothing at first and after progress, then 5 s doubling to 5 minutes.

    Args:
        failure: the last failure.
        before: earlier failures since the budgets were full.
    """
    without_progress = 0
    failures = [*before, failure]
    for number in range(len(failures) - 1, 0, -1):
        step = failures[number].step
        if step is not None and step > furthest_step(failures[:number]):
            break
        without_progress += 1
    return min(_FIRST_DELAY_S * 2 ** (without_progress - 1), _LONGEST_DELAY_S) if without_progress else 0.0


def nodes_to_avoid(failures: Sequence[Failure]) -> set[str]:
    """Return the ids of the nodes on which ranks died twice without progress in between.

    Args:
        failures: earliest first, since the budgets were full.
    """
    deaths: Counter[str] = Counter()
    avoided: set[str] = set()
    for number, failure in enumerate(failures):
        if failure.step is not None and failure.step > furthest_step(failures[:number]):
            # Progress clears the nodes that are not avoided yet.
            deaths.clear()
        if failure.is_death and failure.node_id:
            deaths[failure.node_id] += 1
        avoided |= {node for node, count in deaths.items() if count >= _DEATHS_TO_AVOID}
    return avoided
