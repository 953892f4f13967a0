"""Who saw which rows when, and what of it counts: pure functions of what the ranks have told."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass
class Lived:
    """What one life of a run has told.

    Attributes:
        restored: the update that it went on from; None if it did not come so far.
        rows: by update and rank, the rows of it; and the epoch of each update.
        saved: updates whose checkpoint was told to be committed.
        ended: status and steps that each rank has told at its end.
    """

    restored: int | None = None
    rows: dict[int, dict[int, list[int]]] = field(default_factory=lambda: defaultdict(dict))
    epochs: dict[int, int] = field(default_factory=dict)
    saved: list[int] = field(default_factory=list)
    ended: dict[int, tuple[str, int]] = field(default_factory=dict)

    @property
    def reached(self) -> int:
        """The last update that some rank has completed."""
        return max((self.restored or 0, *self.rows))


def surviving(lives: Sequence[Lived]) -> dict[int, tuple[int, list[int]]]:
    """Returns epoch and rows of each update of the history in which no update was undone.

    What a life had done after the update from which a later one went on was in vain. Within an update a row counts
    once: ranks that must keep in step with the tail of an epoch repeat one, without weight.
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
    """Returns what is wrong with a history, beside that of the undisturbed run."""
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
