"""Find and verify the checkpoints in a storage. Read-only, in one process."""

from __future__ import annotations

import contextlib
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
from .format.file_checksums import FileChecksum
from .format.manifest import MANIFEST, Checkpoint, parse_manifest
from .storage import Storage, open_storage

T = TypeVar("T")

_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_TRIES, _PAUSE_S = 3, 1.0
# Errors by which a file system reports that a disk has lost data.
_LOST = frozenset((errno.EIO, errno.EBADMSG, getattr(errno, "EUCLEAN", errno.EIO)))


class _DiskFailureError(Exception):
    """A local disk has lost data."""


@dataclass(frozen=True, slots=True)
class ScannedCheckpoint:
    """A committed checkpoint, or the problem with its manifest."""

    name: str
    checkpoint: Checkpoint | None
    files: dict[str, FileChecksum]
    problem: str | None

    @property
    def size_bytes(self) -> int:
        """Size of its files; 0 if the manifest is damaged."""
        return sum(each.size_bytes for each in self.files.values())


def scan(storage: Storage) -> list[ScannedCheckpoint]:
    """Return all committed checkpoints in commit order; those with a damaged manifest come last.

    Raises:
        CheckpointError: a manifest cannot be read, but is neither missing nor on a damaged disk.
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
        return scan(storage)  # a run has replaced one meanwhile: scan again
    return sorted(entries, key=lambda each: (each.checkpoint.sequence if each.checkpoint else float("inf"), each.name))


def verify_file(
    storage: Storage,
    name: str,
    file: str,
    expected: FileChecksum,
    into: Path | None = None,
    *,
    only_size: bool = False,
) -> str | None:
    """Return the problem with one file of a checkpoint, or None. Reads the whole file only if its size is right.

    Args:
        storage: storage of the checkpoint.
        name: its name there.
        file: name of the file.
        expected: size and checksum from the manifest.
        into: folder for a copy of a remote file, which is kept; by default it is deleted.
        only_size: do not read the file.

    Raises:
        CheckpointError: the file cannot be read, but is neither missing nor on a damaged disk.
    """

    def verify() -> str | None:
        if (size := storage.size_bytes(name, file)) != expected.size_bytes:
            return f"{file} has {size} of {expected.size_bytes} bytes"
        if only_size:
            return None
        with tempfile.TemporaryDirectory(prefix="headway-verify-") as scratch:
            found = FileChecksum.of(storage.fetch(name, file, into or Path(scratch)))
        return None if found == expected else f"{file} has changed since it was written: its checksum differs"

    try:
        return _read(storage, f"{name}/{file}", verify)
    except _MISSING:
        return f"{file} is missing"
    except _DiskFailureError as error:
        return str(error)


def _read(storage: Storage, file: str, read: Callable[[], T]) -> T:
    """Read with retries: temporary errors of the storage do not mean that a checkpoint is damaged.

    An I/O error of a local disk does: the data is lost, and another checkpoint on the disk may be intact. A network
    file system reports the same error when it is only unreachable.

    Raises:
        CheckpointError: the file cannot be read for another reason than that it is missing.
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
    """Split the path or URI of a checkpoint into its storage and its name."""
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
        what = f"{there} is not a checkpoint: it needs a {MANIFEST} ({type(error).__name__}: {error})"
        with contextlib.suppress(OSError):
            if (newest := _last_inside(there)) is not None:
                what = f"{there} is not a checkpoint, but has some in it: name one of them, such as {newest}"
            if aside := storage.replaced(name):
                what = (
                    f"there is no {there}: a save that was to replace it was interrupted. The earlier checkpoint is "
                    f"{storage.path_of(aside[0])}: rename it to {name}"
                )
        raise CheckpointError(what) from error


def _last_inside(path: str) -> str | None:
    """Return the path of the last checkpoint in the folder of a run, or in its folder of checkpoints; None: no such."""
    for folder in (path, f"{path.rstrip('/')}/checkpoints"):
        storage = open_storage(folder)
        if names := [name for name in storage.names() if name.startswith("step-") and storage.committed(name)]:
            return storage.path_of(max(names))
    return None
