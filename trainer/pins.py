"""Pins: a mark inside a checkpoint that says that a person wants to keep it. Retention never deletes what has one."""

from __future__ import annotations

from .errors import CheckpointError
from .storage import Storage

PIN = "pinned"


def pin(storage: Storage, name: str) -> None:
    """Keeps a checkpoint for good, also from the retention of a run that is going on.

    Raises:
        CheckpointError: there is no such checkpoint, or it was deleted just now.
    """
    try:
        if storage.committed(name):
            storage.write(name, PIN, b"")
    except FileNotFoundError:
        pass
    # Asked afterwards: whoever deletes looks for the mark first, and what was deleted in between is gone.
    if not storage.committed(name):
        raise CheckpointError(f"cannot pin {storage.path_of(name)}: there is no such checkpoint")


def unpin(storage: Storage, name: str) -> None:
    """Gives a checkpoint back to retention, which decides at the next save."""
    if is_pinned(storage, name):
        storage.unlink(name, PIN)


def is_pinned(storage: Storage, name: str) -> bool:
    """Whether somebody wants to keep this checkpoint."""
    return storage.has(name, PIN)
