"""The text files that a dataset is made from: finding them, splitting them, and what they are called."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from .errors import DataError
from .paths import Paths


def split_files(inputs: Paths, *, held_out: float = 0.05, seed: int = 0) -> tuple[list[Path], list[Path]]:
    """Splits files into those to train on and those to hold out, by a hash of their names.

    A file stays on its side when others come or go. Returns at least one file for each side.

    Raises:
        DataError: there are fewer than two files, or `held_out` is not between 0 and 1.
    """
    files = find_files(inputs)
    if not 0 < held_out < 1:
        raise DataError(f"held_out is the part of the files to hold out, between 0 and 1, not {held_out}")
    if len(files) < 2:
        raise DataError(f"there is one file, {files[0]}, and a split takes at least two")
    ranked = sorted(zip(names(files), files, strict=True), key=lambda each: _draw(each[0], seed))
    held = sum(_draw(name, seed) < held_out for name, _ in ranked)
    held = min(max(held, 1), len(files) - 1)
    return sorted(path for _, path in ranked[held:]), sorted(path for _, path in ranked[:held])


def find_files(inputs: Paths) -> list[Path]:
    """Returns the text files that are meant, in the order of their paths.

    Raises:
        DataError: one of the inputs does not exist, or nothing is in it.
    """
    found: set[Path] = set()
    for each in [inputs] if isinstance(inputs, (str, os.PathLike)) else inputs:
        path = Path(each).expanduser().absolute()
        if path.is_dir():
            inside = {file for file in path.rglob("*") if file.is_file() and not _hidden(file.relative_to(path))}
        elif path.is_file():
            inside = {path}
        else:
            inside = {Path(match) for match in glob.glob(str(path), recursive=True) if Path(match).is_file()}
        if not inside:
            what = (
                "is an empty folder"
                if path.is_dir()
                else "is no file and no folder, and as a pattern it matches no file"
            )
            raise DataError(f"{path} {what}")
        found |= inside
    if not found:
        raise DataError("no input was given; name text files, folders or patterns")
    return sorted(found)


def names(files: Sequence[Path]) -> list[str]:
    """Returns names that stay the same when all files are moved together."""
    common = os.path.commonpath([file.parent for file in files])
    return [file.relative_to(common).as_posix() for file in files]


def _draw(name: str, seed: int) -> float:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big") / 2**64


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def count(files: Sequence[Path]) -> str:
    """Returns "1 file" or "7 files"."""
    return f"{len(files)} file{'s' if len(files) != 1 else ''}"
