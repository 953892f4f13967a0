"""Tokenize the source code of Python's standard library into rows, and hold out some files for evaluation.

python examples/prepare_stdlib.py data/stdlib
"""

from __future__ import annotations

import json
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from headway.datasets.prepare import prepare_text, split_files

CONTEXT = 128
VOCABULARY = 2048
# Tests and character tables are two thirds of the library and teach little about style. GUI code makes samples uneven.
SKIPPED = {
    "site-packages", "test", "tests", "encodings", "pydoc_data", "tkinter", "idlelib", "turtledemo", "lib2to3",
}  # fmt: skip
# Line breaks with the following indentation, the parts of snake-case names, and signs, each with the space before it.
WORD = re.compile(r"\n+(?: {4})*| +(?= )| ?_*[A-Za-z]+_*| ?[^\sA-Za-z0-9_]+|.", re.DOTALL)


class WordTokenizer:
    """Splits source code into words. Words outside the vocabulary become its first entry."""

    def __init__(self, vocabulary: Sequence[str]) -> None:
        self._numbers = {word: number for number, word in enumerate(vocabulary)}

    def __call__(self, text: str) -> list[int]:
        return [self._numbers.get(word, 0) for word in WORD.findall(text)]


def make_vocabulary(sources: Sequence[Path]) -> list[str]:
    """Return a placeholder for unknown words, then the most frequent words of the sources."""
    counts = Counter(word for path in sources for word in WORD.findall(path.read_text(errors="replace")))
    return ["\ufffd", *(word for word, _ in counts.most_common(VOCABULARY - 1))]


def main(output: str) -> None:
    library = Path(sysconfig.get_path("stdlib"))
    sources = [path for path in sorted(library.rglob("*.py")) if SKIPPED.isdisjoint(path.relative_to(library).parts)]
    train, held_out = split_files(sources, held_out=0.01)
    vocabulary = make_vocabulary(train)
    for name, files in {"train": train, "held-out": held_out}.items():
        # One token more than the context, because the targets are the same row shifted by one.
        prepared = prepare_text(
            files,
            Path(output) / name,
            row_length=CONTEXT + 1,
            tokenizer=WordTokenizer(vocabulary),
            progress=show_on_one_line,
        )
        print(prepared)
    # Last, because `make train` prepares the data unless this file exists.
    Path(output, "vocabulary.json").write_text(json.dumps(vocabulary))


def show_on_one_line(progress: object) -> None:
    if sys.stderr.isatty():
        print(f"\r{progress}\033[K", end="", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1])
