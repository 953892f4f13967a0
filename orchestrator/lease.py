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


def lease_of(folder: Folder) -> str | None:
    """Returns the same of the run in a folder; None where that cannot be read for the moment."""
    try:
        return lease(json.loads(folder.read(RECORD) or ""))
    except (StorageError, ValueError, TypeError, KeyError):
        return None
