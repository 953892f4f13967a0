"""Which driver a run or a sweep belongs to, as its record says: for who must make sure that it is still theirs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..errors import StorageError
from ..storage.folder import Folder

RUN_RECORD = "run.json"


def lease_of(record: Mapping[str, Any]) -> str:
    """Returns what tells the driver that has claimed a run from every other one, an earlier life of it too."""
    driver = record["driver"]
    return f"{driver['host']} {driver['pid']} {record['started']}"


def takeover_message(folder: Folder, what: str) -> str:
    """Says that a run or a sweep belongs to another driver now."""
    return f"another driver has taken over the {what} in {folder.place}: this one has lost it"


def lease_lost(folder: Folder, mine: str) -> bool:
    """Whether a later driver has claimed the run of a folder. A record that cannot be read says nothing."""
    try:
        return lease_taken(folder, mine, RUN_RECORD)
    except StorageError:
        return False


def lease_taken(folder: Folder, mine: str, record: str) -> bool:
    """Whether a later driver has claimed what lies in a folder. Reads one file.

    A damaged record says nothing, and neither does an earlier one: a network file system may show it.

    Args:
        folder: of the run, or of the sweep.
        mine: the lease of who asks.
        record: the file that says whose it is.

    Raises:
        StorageError: it cannot be read.
    """
    try:
        found = json.loads(folder.read(record) or "")
        return bool(found["started"] >= mine.rpartition(" ")[2] and lease_of(found) != mine)
    except (ValueError, TypeError, KeyError):
        return False
