"""What lies in a storage: which checkpoints, in which order, and whether they are whole. Reads only, in one process."""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from ..errors import CheckpointError
from .file_checksums import FileChecksum
from .manifest import MANIFEST, Checkpoint, parse_manifest
from .storage import Storage, open_storage

T = TypeVar("T")

_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_TRIES, _PAUSE_S = 3, 1.0
# What a file system says of a disk that has lost what was written to it.
_LOST = frozenset((errno.EIO, errno.EBADMSG, getattr(errno, "EUCLEAN", errno.EIO)))


class _DiskFailureError(Exception):
    """A disk has lost what was written to it."""


@dataclass(frozen=True, slots=True)
class ScannedCheckpoint:
    """Something that was committed once: a checkpoint, or what is wrong with its manifest."""

    name: str
    checkpoint: Checkpoint | None
    files: dict[str, FileChecksum]
    problem: str | None


def scan(storage: Storage) -> list[ScannedCheckpoint]:
    """Returns all that was ever committed, in the order of the commits; what is damaged counts as newest.

    Raises:
        CheckpointError: a manifest cannot be read now, and is neither missing nor lost with its disk.
    """
    entries = []
    names = storage.names()
    for name in names:
        if not name.startswith("step-") or not storage.committed(name):
            continue
        try:
            text = _read(storage, f"{name}/{MANIFEST}", partial(storage.read, name, MANIFEST))
            checkpoint, files = parse_manifest(storage.path_of(name), text)
            entries.append(ScannedCheckpoint(name, checkpoint, files, None))
        except _MISSING:
            entries.append(ScannedCheckpoint(name, None, {}, f"{MANIFEST} is missing"))
        except _DiskFailureError as error:
            entries.append(ScannedCheckpoint(name, None, {}, str(error)))
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError):
                raise
            entries.append(ScannedCheckpoint(name, None, {}, str(error)))
    if set(storage.names()) != set(names):
        return scan(storage)  # a run that is still going on has replaced one just now: look again
    return sorted(entries, key=lambda each: (each.checkpoint.sequence if each.checkpoint else float("inf"), each.name))


def verify_file(storage: Storage, name: str, file: str, expected: FileChecksum) -> str | None:
    """Returns what is wrong with one file of a checkpoint, or None. Reads all of it, once its size is right.

    Raises:
        CheckpointError: the file cannot be read now, and is neither missing nor lost with its disk.
    """

    def look() -> str | None:
        if (size := storage.size_bytes(name, file)) != expected.size_bytes:
            return f"{file} has {size} of {expected.size_bytes} bytes"
        with tempfile.TemporaryDirectory(prefix="headway-verify-") as scratch:
            found = FileChecksum.of(storage.fetch(name, file, Path(scratch)), algorithm=expected.algorithm)
        return None if found == expected else f"{file} is not what was written: its checksum differs"

    try:
        return _read(storage, f"{name}/{file}", look)
    except _MISSING:
        return f"{file} is missing"
    except _DiskFailureError as error:
        return str(error)


def _read(storage: Storage, file: str, read: Callable[[], T]) -> T:
    """Reads, in several tries if need be: a place that cannot be read now does not make a checkpoint a damaged one.

    A disk of this machine that says that it cannot be read does: it will not come back, and another checkpoint on it
    may be whole. A network file system says the same where it is only away.

    Raises:
        CheckpointError: it cannot be read, though nobody says that it is missing.
        _DiskFailureError: it is lost, on a disk of this machine.
    """
    for left in reversed(range(_TRIES)):
        try:
            return read()
        except _MISSING:
            raise
        except OSError as error:
            if left:
                time.sleep(_PAUSE_S)
                continue
            if error.errno in _LOST and storage.is_disk():
                name = file.rpartition("/")[2]
                raise _DiskFailureError(
                    f"{name} cannot be read in {_TRIES} tries ({error.strerror}): the disk is damaged"
                ) from error
            raise CheckpointError(
                f"{storage.path_of(file)} cannot be read ({type(error).__name__}: {error}), so nobody knows whether it "
                "is whole: make it readable, or move its checkpoint away to go on without it"
            ) from error
    raise AssertionError


def split_path(path: str) -> tuple[Storage, str]:
    """Splits the path or URI of a checkpoint into the storage and its name there."""
    parent, _, name = path.rstrip("/").rpartition("/")
    return open_storage(parent if parent else "/" if path.startswith("/") else "."), name


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Reads what one checkpoint says of itself; its other files are not looked at.

    Raises:
        CheckpointError: there is no checkpoint at this path or URI.
    """
    storage, name = split_path(os.fspath(path))
    there = storage.path_of(name)
    try:
        return parse_manifest(there, storage.read(name, MANIFEST))[0]
    except OSError as error:
        raise CheckpointError(
            f"{there} is not a checkpoint: a directory with a {MANIFEST} was needed ({type(error).__name__}: {error})"
        ) from error
