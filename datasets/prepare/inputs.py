"""Finds, splits and names the text files that a dataset is prepared from."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from ..errors import DataError
from ..paths import Paths


def split_files(inputs: Paths, *, held_out: float = 0.05, seed: int = 0) -> tuple[list[Path], list[Path]]:
    """Split files into (train, held out) by a hash of their names, with at least one file on each side.

    A file stays on its side when other files are added or removed.

    Raises:
        DataError: there are fewer than two files, or `held_out` is not between 0 and 1.
    """
    files = find_files(inputs)
    if not 0 < held_out < 1:
        raise DataError(f"held_out (the fraction of files to hold out) must be between 0 and 1, got {held_out}")
    if len(files) < 2:
        raise DataError(f"found one file, {files[0]}, but a split needs at least two")
    ranked = sorted(zip(names(files), files, strict=True), key=lambda each: _draw(each[0], seed))
    held = sum(_draw(name, seed) < held_out for name, _ in ranked)
    held = min(max(held, 1), len(files) - 1)
    return sorted(path for _, path in ranked[held:]), sorted(path for _, path in ranked[:held])


def find_files(inputs: Paths) -> list[Path]:
    """Return the input text files, sorted by path.

    Raises:
        DataError: an input does not exist or is empty.
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
            what = "is an empty folder" if path.is_dir() else "is not a file or folder, and matches no file as a glob"
            raise DataError(f"{path} {what}")
        found |= inside
    if not found:
        raise DataError("inputs is empty; name text files, folders or globs")
    return sorted(found)


def names(files: Sequence[Path]) -> list[str]:
    """Return names relative to the common folder, which do not change when all files are moved together."""
    common = os.path.commonpath([file.parent for file in files])
    return [file.relative_to(common).as_posix() for file in files]


def _draw(name: str, seed: int) -> float:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big") / 2**64


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)
