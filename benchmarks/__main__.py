"""Run the benchmarks and print one table. To run some of them: `python -m benchmarks loop sweep:asha`.

`goodput` (and `goodput:machines`) runs only if named, because it takes ten minutes (or GOODPUT_MINUTES).
"""

from __future__ import annotations

import importlib
import sys

from .table import show

PARTS = (
    "loop",
    "exact",
    "saving",
    "pretrained",
    "stream",
    "data",
    "start",
    "restart",
    "compile_cache",
    "sweep",
    "search",
    "records",
    "heartbeats",
)


def main(parts: list[str]) -> int:
    """Print the table, and return the number of missed targets."""
    rows = []
    for part in parts or PARTS:
        file, *some = part.split(":")
        rows += importlib.import_module(f"benchmarks.{file}").rows(*some)
    print(show(rows))
    return sum(not row.ok for row in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
