"""Text tables and times. Imports neither torch nor Ray, so it is fast."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime


def format_table(rows: Sequence[Sequence[str]], *, right: Collection[str] = ()) -> str:
    """Return rows as aligned text. Cells are never shortened, so that names can be copied and output piped.

    Args:
        rows: the first one has the headings.
        right: headings of the columns that are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [f"{{:{'>' if heading in right else '<'}{width}}}" for heading, width in zip(rows[0], widths, strict=True)]
    line = "  ".join(cells)
    return "\n".join(line.format(*row).rstrip() for row in rows)


def local_time(moment: str | float) -> str:
    """Return a time (ISO 8601, or seconds since 1970) in the local time zone."""
    at = datetime.fromisoformat(moment).astimezone() if isinstance(moment, str) else datetime.fromtimestamp(moment)
    return at.strftime("%Y-%m-%d %H:%M:%S")
