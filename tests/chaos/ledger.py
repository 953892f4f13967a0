"""Which rank saw which rows, and which of it counts: pure functions of the reports of the ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass
class Lived:
    """The reports of one life of a run.

    Attributes:
        restored: the update that it resumed from; None if it ended before.
        rows: rows by update and rank, with the epoch of each update.
        saved: updates whose checkpoint was reported as committed.
        ended: status and steps that each rank reported at its end.
    """

    restored: int | None = None
    rows: dict[int, dict[int, list[int]]] = field(default_factory=lambda: defaultdict(dict))
    epochs: dict[int, int] = field(default_factory=dict)
    saved: list[int] = field(default_factory=list)
    ended: dict[int, tuple[str, int]] = field(default_factory=dict)

    @property
    def reached(self) -> int:
        """The last update completed by any rank."""
        return max((self.restored or 0, *self.rows))


def surviving(lives: Sequence[Lived]) -> dict[int, tuple[int, list[int]]]:
    """Return epoch and rows of each update of the surviving history.

    Updates of a life after the one from which a later life resumed do not count. Within an update a row counts once:
    in the tail of an epoch, ranks may repeat one with weight 0.
    """
    history: dict[int, tuple[int, list[int]]] = {}
    for life in lives:
        if life.restored is None:
            continue
        history = {step: row for step, row in history.items() if step <= life.restored}
        for step, ranks in life.rows.items():
            history[step] = (life.epochs[step], sorted({row for rows in ranks.values() for row in rows}))
    return dict(sorted(history.items()))


def complaints(history: Mapping[int, tuple[int, list[int]]], wanted: Mapping[int, tuple[int, list[int]]]) -> list[str]:
    """Return how a history deviates from that of the undisturbed run."""
    found = []
    if list(history) != list(range(1, len(history) + 1)):
        missing = sorted(set(range(1, max(history, default=0) + 1)) - set(history))
        found.append(f"updates {missing} are in no surviving life")
    for epoch in sorted({epoch for epoch, _ in wanted.values()}):
        rows = [row for each, rows in history.values() if each == epoch for row in rows]
        due = [row for each, rows in wanted.values() if each == epoch for row in rows]
        if twice := sorted({row for row in rows if rows.count(row) > 1}):
            found.append(f"epoch {epoch}: rows {twice} were learned from more than once")
        if lost := sorted(set(due) - set(rows)):
            found.append(f"epoch {epoch}: rows {lost} were never learned from")
        if foreign := sorted(set(rows) - set(due)):
            found.append(f"epoch {epoch}: rows {foreign} are not those of the undisturbed run")
    if len(history) != len(wanted):
        found.append(f"{len(history)} updates instead of {len(wanted)}")
    if not found and (other := [step for step in wanted if history[step] != wanted[step]]):
        found.append(f"updates {other} had other rows than those of the undisturbed run")
    return found
