"""The events of a run, one JSON object per line, written by its driver and its workers."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

from .folder import Folder

Event = dict[str, Any]
# Details for programs, or too long for a line.
_NOT_DESCRIBED = ("time", "event", "workers", "hopeless", "seconds", "spent", "since", "data")


class EventWriter:
    """Appends to the events of a run. Threads may share a writer.

    On a disk all writers append to `events.jsonl`. An object store cannot append, so there each writer replaces its own
    file `events-<writer>.jsonl`; events are few.

    Args:
        folder: the run's folder.
        writer: name of this writer, unique among concurrent writers.
    """

    def __init__(self, folder: Folder, writer: str) -> None:
        self._folder, self._writer = folder, writer
        self._own: str | None = None
        self._lock = threading.Lock()

    def add(self, kind: str, **details: Any) -> None:
        """Write one event, with the time in seconds since 1970."""
        line = json.dumps({"time": round(time.time(), 3), "event": kind, **details}, default=str)
        if self._folder.is_local:
            self._folder.append("events.jsonl", line)
            return
        name = f"events-{self._writer}.jsonl"
        with self._lock:
            if self._own is None:
                self._own = self._folder.read(name) or ""
            self._own += f"{line}\n"
            self._folder.write(name, self._own)


def read_events(folder: Folder) -> list[Event]:
    """Return all events of a run, earliest first."""
    events = [event for name in folder.files("events") for event in _parsed((folder.read(name) or "").encode())[0]]
    return sorted(events, key=lambda event: event.get("time", 0.0))


def describe(event: Event) -> str:
    """Return the details of an event, without its time and kind, as one line."""
    return ", ".join(
        f"{key} {value}"
        for key, value in {**event, **event.get("seconds", {})}.items()
        if key not in _NOT_DESCRIBED and value is not None
    )


class JsonlTail:
    """Reads the lines that were added to one or several JSON Lines files since the last read.

    A file that was truncated (the metrics of a resumed run) is read again, without the lines seen before.

    Args:
        folder: the run's folder.
        prefix: prefix of the files' names, e.g. "events" or "metrics.jsonl".
        from_now: skip the lines that exist already.
    """

    def __init__(self, folder: Folder, prefix: str, *, from_now: bool) -> None:
        self._folder, self._prefix = folder, prefix
        self._offsets: dict[str, int] = {}
        self._seen: set[str] = set()
        if from_now:
            self.read()

    def read(self) -> list[Event]:
        """Return the new objects by time. An incomplete line is left for the next read.

        Raises:
            StorageError: a file cannot be read; the next call returns the objects of all files.
        """
        found: list[Event] = []
        offsets = dict(self._offsets)
        names = [self._prefix] if "." in self._prefix else self._folder.files(self._prefix)
        for name in names:
            offset = offsets.get(name, 0)
            data, size = self._folder.read_from(name, offset)
            if size < offset:
                data, size = self._folder.read_from(name, 0)
                offset = 0
            events, used = _parsed(data)
            offsets[name] = offset + used
            found += events
        self._offsets = offsets
        fresh: dict[str, Event] = {}
        for event in found:
            if (line := json.dumps(event, sort_keys=True)) not in self._seen:
                self._seen.add(line)
                fresh[line] = event
        return sorted(fresh.values(), key=lambda event: event.get("time", 0.0))


def _parsed(data: bytes) -> tuple[list[Event], int]:
    """Return the objects of complete lines and the bytes they took. A line torn by a crash is skipped."""
    used = data.rfind(b"\n") + 1
    events: list[Event] = []
    for line in data[:used].splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            events.append(event)
    return events, used
