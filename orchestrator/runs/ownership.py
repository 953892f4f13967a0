"""Leases: which driver owns a run or a sweep, according to its record.

A lease is the id of the driver's claim on the folder (trainer/ownership). Claims have numbers, so that no clocks are
compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from headway.trainer.ownership.claim import Ownership, acquire, check_unowned
from headway.trainer.ownership.claim_files import number_of

from ..errors import RunConflictError, StorageError
from ..storage.folder import Folder, access_hint

RUN_RECORD = "run.json"


def own_folder(folder: Folder, *, say: Callable[[str], None] = lambda _: None, take_over: bool = False) -> Ownership:
    """Claim the folder of a run or a sweep for this process.

    Args:
        folder: the folder.
        say: is given a line before a wait for the heartbeats of an owner on another machine.
        take_over: also take it from a live process.

    Raises:
        RunConflictError: a live process owns it.
        StorageError: the folder cannot be read or written.
    """
    try:
        return acquire(folder.place, say=say, as_driver=True, take_over=take_over)
    except RunConflictError:
        raise
    except Exception as error:  # each file system has its own exceptions
        hint = access_hint(folder.place, error)
        raise StorageError(f"{folder.place} cannot be claimed: {type(error).__name__}: {error}{hint}") from error


def check_not_owned(folder: Folder, *, watch: bool) -> None:
    """Check without writing that no live process owns a folder.

    Args:
        folder: the folder.
        watch: wait for the heartbeats of an owner on another machine; otherwise that owner counts as gone.

    Raises:
        RunConflictError: a live process owns it.
        StorageError: the folder cannot be read.
    """
    try:
        check_unowned(folder.place, watch=watch, from_itself=True)
    except RunConflictError:
        raise
    except Exception as error:
        hint = access_hint(folder.place, error)
        raise StorageError(f"{folder.place} cannot be read: {type(error).__name__}: {error}{hint}") from error


def lease_of(record: Mapping[str, Any]) -> str:
    """Return the lease of the driver in a record, which is unique for each driver and start."""
    return str(record.get("claim", ""))


def takeover_message(folder: Folder, what: str) -> str:
    """Return the error message for a lost lease. `what` is "run" or "sweep"."""
    return f"another process took over this {what} ({folder.place}); exiting"


def lease_lost(folder: Folder, lease: str) -> bool:
    """Return whether a later driver owns a run; False if its record cannot be read."""
    try:
        return lease_taken(folder, lease, RUN_RECORD)
    except StorageError:
        return False


def lease_taken(folder: Folder, lease: str, record: str) -> bool:
    """Return whether a later driver owns a run or a sweep. Reads one file.

    Returns False for a damaged record, and for an earlier one, which a network file system may still return.

    Args:
        folder: folder of the run or the sweep.
        lease: the caller's lease.
        record: name of the record's file.

    Raises:
        StorageError: the record cannot be read.
    """
    try:
        found = lease_of(json.loads(folder.read(record) or ""))
        return number_of(found) >= number_of(lease) and found != lease
    except (ValueError, TypeError, AttributeError):
        return False
