"""Measures all rows and prints one table; names of files choose among them: `python -m benchmarks loop sweep:asha`.

`goodput` takes ten minutes, or GOODPUT_MINUTES, and is measured only where it is named.
"""

from __future__ import annotations

import importlib
import sys

from .table import show

PARTS = ("loop", "exact", "saving", "stream", "start", "restart", "sweep", "records")


def main(parts: list[str]) -> int:
    """Prints the table, and returns how many targets were missed."""
    rows = []
    for part in parts or PARTS:
        file, *some = part.split(":")
        rows += importlib.import_module(f"benchmarks.{file}").rows(*some)
    print(show(rows))
    return sum(not row.ok for row in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
