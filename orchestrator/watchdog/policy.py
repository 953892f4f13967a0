"""Which rank hangs, if any: a pure function of the heartbeats; `driver.py` acts on it.

All ranks run the same collectives and wait for one another, so only the rank that is furthest behind can be at fault:
the others may wait for it indefinitely. It hangs if it stays in one phase much longer than usual. A rank whose
heartbeats stop (stopped, swapped out, or in a call that never releases the GIL) is at fault by itself.

Clocks of different machines are never compared: a rank reports for how long it has been in its phase, and silence is
measured by the driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.trainer.loop.timing import PHASES, Phase

_STEADY: tuple[Phase, ...] = (
    "reading validation data", "evaluation", "reading data", "forward", "backward", "optimizer",
)  # fmt: skip
"""Phases that take about as long each time. Hooks, saves and the code around evaluations may vary by minutes."""


@dataclass(frozen=True, kw_only=True)
class HangTimeouts:
    """When to report a straggler, and when to end the attempt. All in seconds.

    A phase is steady if it takes about as long each time and has been timed; see `Rank.is_steady`.

    Attributes:
        fixed_s: limit for every phase, if the user has set one.
        startup_s: limit for a phase that is not steady, as the first ones of an attempt, which compile and load.
        steady_s: least limit for a steady phase.
        factor: a phase may take this many times its usual time, if that is longer.
        steady_warn_s: least time before a rank in a steady phase is reported.
        silent_after_s: without a heartbeat for so long a rank counts as silent.
        silent_kill_s: limit for silence in a steady phase.
        silent_kill_startup_s: limit for silence in any other phase.
    """

    fixed_s: float | None = None
    startup_s: float = 1800.0
    steady_s: float = 300.0
    factor: float = 10.0
    steady_warn_s: float = 30.0
    silent_after_s: float = 4.0
    silent_kill_s: float = 30.0
    silent_kill_startup_s: float = 300.0

    def kill_after_s(self, rank: Rank) -> float:
        """Return how long a rank may stay in its phase."""
        if self.fixed_s is not None:
            return self.fixed_s
        usual_s = self.factor * (rank.usual_s or 0.0)
        return max(self.steady_s if rank.is_steady else self.startup_s, usual_s)

    def warn_after_s(self, rank: Rank) -> float:
        """Return after how long in its phase a rank is reported, which ends nothing."""
        if self.fixed_s is None and rank.is_steady:
            return max(self.steady_warn_s, self.factor / 2 * (rank.usual_s or 0.0))
        return self.kill_after_s(rank) / 2

    def silent_kill_after_s(self, rank: Rank) -> float:
        """Return how long a rank may be silent while others send heartbeats."""
        if self.fixed_s is not None:
            return max(self.fixed_s, self.silent_after_s)
        # The phase's usual time may itself be a call that holds the GIL.
        usual_s = self.factor * (rank.usual_s or 0.0)
        return max(self.silent_kill_s if rank.is_steady else self.silent_kill_startup_s, self.silent_after_s, usual_s)


@dataclass(frozen=True, kw_only=True)
class Rank:
    """What the driver knows of one rank.

    Attributes:
        rank: its number.
        phase: as of its last heartbeat.
        for_s: time in this phase until now.
        usual_s: the longest time that the phase usually takes; None if it has not happened often enough.
        updates: completed in this attempt.
        batches: micro-batches started since the last update.
        step: completed updates of the run.
        silent_s: time since its last heartbeat.
    """

    rank: int
    phase: Phase = "setting up"
    for_s: float = 0.0
    usual_s: float | None = None
    updates: int = 0
    batches: int = 0
    step: int = 0
    silent_s: float = 0.0

    @property
    def is_steady(self) -> bool:
        """Whether the phase takes about as long each time, and has been timed."""
        return self.phase in _STEADY and self.usual_s is not None

    @property
    def position(self) -> tuple[int, int, int]:
        """How far the rank is, comparable between ranks."""
        return self.updates, self.batches, PHASES.index(self.phase)


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """The rank that the others wait for.

    Attributes:
        ranks: one rank, or several if they are equally far behind.
        phase: the phase that they are in.
        step: completed updates of the run.
        for_s: how long they have been there.
        is_silent: whether their heartbeats have stopped.
        is_hung: whether they have exceeded the limit.
    """

    ranks: tuple[int, ...]
    phase: Phase
    step: int
    for_s: float
    is_silent: bool
    is_hung: bool

    def __str__(self) -> str:
        many = len(self.ranks) > 1
        who = f"{'ranks' if many else 'rank'} {', '.join(map(str, self.ranks))} {'have' if many else 'has'}"
        where = f"in phase {self.phase!r} at step {self.step}"
        if self.is_silent:
            return f"{who} sent no heartbeat for {self.for_s:.0f} s, last seen {where}"
        return f"{who} not moved for {self.for_s:.0f} s, {where}"


def find_straggler(ranks: Sequence[Rank], timeouts: HangTimeouts) -> Straggler | None:
    """Return the rank that has kept the others waiting for too long, or None."""
    present = [rank for rank in ranks if rank.phase != "ended"]
    silent = [rank for rank in present if rank.silent_s > timeouts.silent_after_s]
    if len(silent) == len(present) > 1:
        # All silent: more likely the storage that carries the heartbeats than every rank.
        longest = min(rank.silent_s for rank in silent)
        limit_s = timeouts.fixed_s or timeouts.startup_s
        return _straggler(silent, longest, is_silent=True, is_hung=longest > limit_s) if longest > limit_s / 2 else None
    if silent:
        longest = max(rank.silent_s for rank in silent)
        is_hung = any(rank.silent_s > timeouts.silent_kill_after_s(rank) for rank in silent)
        return _straggler(silent, longest, is_silent=True, is_hung=is_hung)
    if not present:
        return None
    last = min(rank.position for rank in present)
    behind = [rank for rank in present if rank.position == last]
    for_s = min(rank.for_s for rank in behind)
    if for_s <= max(timeouts.warn_after_s(rank) for rank in behind):
        return None
    is_hung = for_s > max(timeouts.kill_after_s(rank) for rank in behind)
    return _straggler(behind, for_s, is_silent=False, is_hung=is_hung)


def _straggler(ranks: Sequence[Rank], for_s: float, *, is_silent: bool, is_hung: bool) -> Straggler:
    first = ranks[0]
    return Straggler(
        ranks=tuple(sorted(rank.rank for rank in ranks)), phase=first.phase, step=first.step, for_s=for_s,
        is_silent=is_silent, is_hung=is_hung,
    )  # fmt: skip
