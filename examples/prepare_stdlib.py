"""Turns the source of Python's standard library into token rows, one part of the files held out for evaluation.

python examples/prepare_stdlib.py data/stdlib
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from headway.datasets.prepare import prepare_text, split_files

CONTEXT = 128


def main(output: str) -> None:
    library = Path(sysconfig.get_path("stdlib"))
    sources = [path for path in sorted(library.rglob("*.py")) if "site-packages" not in path.parts]
    train, held_out = split_files(sources, held_out=0.01)
    for name, files in {"train": train, "held-out": held_out}.items():
        # A row has one token more than the model reads: what it predicts is the same row, one further.
        print(prepare_text(files, Path(output) / name, row_length=CONTEXT + 1, progress=show_on_one_line))


def show_on_one_line(progress: object) -> None:
    if sys.stderr.isatty():
        print(f"\r{progress}\033[K", end="", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1])
