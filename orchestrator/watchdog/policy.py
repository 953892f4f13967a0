"""Which rank hangs, if any: decided by arithmetic from what the ranks say of themselves; `watching.py` acts.

All ranks walk the same road and wait for one another, so only the rank that is furthest behind can be to blame: the
others may wait for it as long as it takes. It hangs if it stays in one phase much longer than usual. A rank that says
nothing any more (stopped, swapped out, or in a call that never lets another thread run) is to blame by itself.

No clock of one machine is compared with that of another: a rank says for how long it has been in its phase, and
silence is measured where it is heard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.trainer.loop.timing import PHASES, Phase

_STEADY: tuple[Phase, ...] = (
    "reading validation data", "evaluation", "reading data", "forward", "backward", "optimizer",
)  # fmt: skip
"""What takes about as long every time. Hooks, saves and what surrounds evaluations may take minutes out of the blue."""


@dataclass(frozen=True, kw_only=True)
class HangTimeouts:
    """When to speak of a rank that is straggler, and when to end the attempt. All in seconds.

    Attributes:
        fixed_s: ends every phase that takes longer than this, where a person has said so.
        startup_s: ends a phase of which nobody knows how long it takes: the first ones of an attempt, which compile and
            load, and what is not the same each time.
        steady_s: ends at least not before this what takes about as long every time.
        factor: times the usual is too long, if that is later.
        steady_warn_s: leaves a rank unnamed at least so long in such a phase.
        silent_after_s: makes a rank suspect of which nothing is heard, while others are.
        silent_kill_s: ends an attempt in which a rank has been silent for so long in a phase that is steady.
        silent_kill_startup_s: the same in another phase.
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
        """How long a rank may stay where it is."""
        if self.fixed_s is not None:
            return self.fixed_s
        usual_s = self.factor * (rank.usual_s or 0.0)
        return max(self.steady_s if rank.is_steady else self.startup_s, usual_s)

    def warn_after_s(self, rank: Rank) -> float:
        """How long until others are told of it, which ends nothing."""
        if self.fixed_s is None and rank.is_steady:
            return max(self.steady_warn_s, self.factor / 2 * (rank.usual_s or 0.0))
        return self.kill_after_s(rank) / 2

    def silent_kill_after_s(self, rank: Rank) -> float:
        """How long a rank may say nothing while others speak."""
        if self.fixed_s is not None:
            return max(self.fixed_s, self.silent_after_s)
        # A call that lets no other thread run may be what usually takes so long.
        usual_s = self.factor * (rank.usual_s or 0.0)
        return max(self.silent_kill_s if rank.is_steady else self.silent_kill_startup_s, self.silent_after_s, usual_s)


@dataclass(frozen=True, kw_only=True)
class Rank:
    """What is known of one rank.

    Attributes:
        rank: which one.
        phase: what it does, or did when it was last heard.
        for_s: for how long, until now.
        usual_s: how long that takes at most; None where it has not happened often enough.
        updates: made in this attempt.
        batches: micro-batches begun since.
        step: completed updates of the run.
        silent_s: since it was last heard.
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
        """Whether the phase takes about as long every time, and it is known how long."""
        return self.phase in _STEADY and self.usual_s is not None

    @property
    def position(self) -> tuple[int, int, int]:
        """How far it is, to be compared with the place of other ranks."""
        return self.updates, self.batches, PHASES.index(self.phase)


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """Who keeps the others waiting.

    Attributes:
        ranks: one, unless several are equally far and nobody can emit.
        phase: that they are in.
        step: completed updates of the run.
        for_s: how long they have been there.
        is_silent: whether nothing is heard of them.
        is_hung: whether the timeouts is.
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
            return f"{who} said nothing for {self.for_s:.0f} s, last heard {where}"
        return f"{who} not moved for {self.for_s:.0f} s, {where}"


def find_straggler(ranks: Sequence[Rank], timeouts: HangTimeouts) -> Straggler | None:
    """Returns who keeps the others waiting for too long; None while all goes well, as far as anybody can emit."""
    present = [rank for rank in ranks if rank.phase != "ended"]
    silent = [rank for rank in present if rank.silent_s > timeouts.silent_after_s]
    if len(silent) == len(present) > 1:
        # More likely the storage, over which all are heard, than all of them.
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
    return _straggler(
        behind, for_s, is_silent=False, is_hung=for_s > max(timeouts.kill_after_s(rank) for rank in behind)
    )


def _straggler(ranks: Sequence[Rank], for_s: float, *, is_silent: bool, is_hung: bool) -> Straggler:
    first = ranks[0]
    return Straggler(
        ranks=tuple(sorted(rank.rank for rank in ranks)),
        phase=first.phase,
        step=first.step,
        for_s=for_s,
        is_silent=is_silent,
        is_hung=is_hung,
    )
