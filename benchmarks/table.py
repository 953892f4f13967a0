"""The table that `make bench` prints, and its measurements: medians over interleaved pairs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Row(NamedTuple):
    """One row of the table. A part of another row has no target."""

    name: str
    ours: str
    theirs: str
    ratio: float
    target: str
    ok: bool


def interleave(ours: Callable[[], float], theirs: Callable[[], float], *, pairs: int) -> list[tuple[float, float]]:
    """Measure both in alternating order, so that a busy moment of the machine affects both alike."""
    measured = []
    for number in range(pairs):
        if number % 2:
            second = theirs()
            measured.append((ours(), second))
        else:
            first = ours()
            measured.append((first, theirs()))
    return measured


def median_ratio(measured: Sequence[tuple[float, float]]) -> float:
    """Return the median of ours / theirs over the pairs."""
    return statistics.median(ours / theirs for ours, theirs in measured)


def show(rows: Sequence[Row]) -> str:
    """Return the table as text."""
    header = ("what", "ours", "theirs", "ratio", "target", "")
    lines = [header]
    for row in rows:
        lines.append((row.name, row.ours, row.theirs, f"{row.ratio:.3f}", row.target, _verdict(row)))
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def _verdict(row: Row) -> str:
    if not row.target:
        return ""
    return "ok" if row.ok else "MISSED"
