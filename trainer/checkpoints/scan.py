"""Finds and verifies the checkpoints in a storage. Reads only, in one process."""

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
# Errors with which a file system reports that a disk has lost data.
_LOST = frozenset((errno.EIO, errno.EBADMSG, getattr(errno, "EUCLEAN", errno.EIO)))


class _DiskFailureError(Exception):
    """A local disk has lost data."""


@dataclass(frozen=True, slots=True)
class ScannedCheckpoint:
    """Something that was once committed: a checkpoint, or what is wrong with its manifest."""

    name: str
    checkpoint: Checkpoint | None
    files: dict[str, FileChecksum]
    problem: str | None


def scan(storage: Storage) -> list[ScannedCheckpoint]:
    """Return all committed checkpoints in the order of their commits; those with a damaged manifest come last.

    Raises:
        CheckpointError: a manifest cannot be read now, but is neither missing nor on a damaged disk.
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
        return scan(storage)  # a run that is training now has replaced one: scan again
    return sorted(entries, key=lambda each: (each.checkpoint.sequence if each.checkpoint else float("inf"), each.name))


def verify_file(storage: Storage, name: str, file: str, expected: FileChecksum) -> str | None:
    """Return what is wrong with one file of a checkpoint, or None. Read the whole file only if its size is right.

    Raises:
        CheckpointError: the file cannot be read now, but is neither missing nor on a damaged disk.
    """

    def verify() -> str | None:
        if (size := storage.size_bytes(name, file)) != expected.size_bytes:
            return f"{file} has {size} of {expected.size_bytes} bytes"
        with tempfile.TemporaryDirectory(prefix="headway-verify-") as scratch:
            found = FileChecksum.of(storage.fetch(name, file, Path(scratch)))
        return None if found == expected else f"{file} is not what was written: its checksum differs"

    try:
        return _read(storage, f"{name}/{file}", verify)
    except _MISSING:
        return f"{file} is missing"
    except _DiskFailureError as error:
        return str(error)


def _read(storage: Storage, file: str, read: Callable[[], T]) -> T:
    """Read with retries: a storage that cannot be read now does not make a checkpoint damaged.

    An I/O error of a local disk does: the data will not come back, and another checkpoint on the disk may be intact. A
    network file system reports the same error when it is only unreachable.

    Raises:
        CheckpointError: the file cannot be read, but is not known to be missing.
        _DiskFailureError: the file is lost on a local disk.
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
                f"{storage.path_of(file)} cannot be read ({type(error).__name__}: {error}), so it is unknown whether "
                "it is intact: make it readable, or move its checkpoint away to continue without it"
            ) from error
    raise AssertionError


def split_path(path: str) -> tuple[Storage, str]:
    """Split the path or URI of a checkpoint into the storage and its name there."""
    parent, _, name = path.rstrip("/").rpartition("/")
    return open_storage(parent if parent else "/" if path.startswith("/") else "."), name


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read the manifest of one checkpoint; its other files are not checked.

    Raises:
        CheckpointError: there is no checkpoint at this path or URI.
    """
    storage, name = split_path(os.fspath(path))
    there = storage.path_of(name)
    try:
        return parse_manifest(there, storage.read(name, MANIFEST))[0]
    except OSError as error:
        raise CheckpointError(
            f"{there} is not a checkpoint: it needs a {MANIFEST} ({type(error).__name__}: {error})"
        ) from error
