"""Which driver a run belongs to, as its record says: for workers, which make sure that it is still theirs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .errors import StorageError
from .storage import Folder

RECORD = "run.json"


def lease(record: Mapping[str, Any]) -> str:
    """Returns what tells the driver that has claimed a run from every other one, an earlier life of it too."""
    driver = record["driver"]
    return f"{driver['host']} {driver['pid']} {record['started']}"


def is_lost(folder: Folder, mine: str) -> bool:
    """Whether a later driver has claimed the run of a folder.

    A record that cannot be read says nothing, and neither does an earlier one: a network file system may show it.
    """
    try:
        found = json.loads(folder.read(RECORD) or "")
        return bool(found["started"] >= mine.rpartition(" ")[2] and lease(found) != mine)
    except (StorageError, ValueError, TypeError, KeyError):
        return False
