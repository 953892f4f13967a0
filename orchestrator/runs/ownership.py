"""Leases: which driver owns a run or a sweep, according to its record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..errors import StorageError
from ..storage.folder import Folder

RUN_RECORD = "run.json"


def lease_of(record: Mapping[str, Any]) -> str:
    """Return the lease of the driver in a record, which is unique for each driver and start."""
    driver = record["driver"]
    return f"{driver['host']} {driver['pid']} {record['started']}"


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
        found = json.loads(folder.read(record) or "")
        return bool(found["started"] >= lease.rpartition(" ")[2] and lease_of(found) != lease)
    except (ValueError, TypeError, KeyError):
        return False
