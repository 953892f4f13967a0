"""Human-readable bytes and durations. Imports no torch."""

from __future__ import annotations


def human_bytes(num_bytes: float, *, digits: int = 4) -> str:
    """Format bytes with `digits` significant digits: "512 B", "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.{digits}g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.{digits}g} TiB"


def human_duration(seconds: float) -> str:
    """Format seconds: "42s", "3m12s", "2h05m", "3d04h"."""
    whole = round(seconds)
    for unit_s, unit, part_s, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= unit_s:
            return f"{whole // unit_s}{unit}{whole % unit_s // part_s:02d}{part}"
    return f"{whole}s"
