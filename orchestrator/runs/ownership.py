"""Leases: which driver owns a run or a sweep, as its record says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..errors import StorageError
from ..storage.folder import Folder

RUN_RECORD = "run.json"


def lease_of(record: Mapping[str, Any]) -> str:
    """Return the lease of the driver that owns a run: different for each driver and each of its starts."""
    driver = record["driver"]
    return f"{driver['host']} {driver['pid']} {record['started']}"


def takeover_message(folder: Folder, what: str) -> str:
    """Return the message of the error for a lost lease. `what` is "run" or "sweep"."""
    return f"another process took over this {what} ({folder.place}); exiting"


def lease_lost(folder: Folder, lease: str) -> bool:
    """Return whether a later driver owns the run of a folder; False if its record cannot be read."""
    try:
        return lease_taken(folder, lease, RUN_RECORD)
    except StorageError:
        return False


def lease_taken(folder: Folder, lease: str, record: str) -> bool:
    """Return whether a later driver owns the run or the sweep of a folder. Reads one file.

    False for a damaged record, and for an earlier one, which a network file system may still show.

    Args:
        folder: of the run or the sweep.
        lease: the caller's lease.
        record: name of the record's file.

    Raises:
        StorageError: the record cannot be read.
    """
    try:
        found = json.loads(folder.read(record) or "")
        return bool(found["started"] >= lease.rpartition(" ")[2] and lease_of(found) != lease)
    except (ValueError, TypeError, KeyError):
        return False
