"""What happened to a run, one JSON object per line: written by several processes, read by anybody."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

from .folder import Folder

Event = dict[str, Any]
# What is for programs, or long.
_NOT_IN_WORDS = ("time", "event", "workers", "hopeless", "seconds", "spent", "since", "data")


class EventWriter:
    """Appends to the events of a run.

    Where files can be appended to, all writers share `events.jsonl`. An object store cannot append: there each writer
    has `events-<writer>.jsonl` of its own and replaces it; events are few.

    Args:
        folder: of the run.
        writer: who writes; no two writers of one name at a time.
    """

    def __init__(self, folder: Folder, writer: str) -> None:
        self._folder, self._writer = folder, writer
        self._own: str | None = None
        # Threads of the writer's process share it: what listens for notices, and the training.
        self._lock = threading.Lock()

    def add(self, kind: str, **details: Any) -> None:
        """Writes one event, with the time in seconds since 1970."""
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
    """Returns all events of a run, the earliest first."""
    events = [event for name in folder.files("events") for event in _parsed((folder.read(name) or "").encode())[0]]
    return sorted(events, key=lambda event: event.get("time", 0.0))


def describe(event: Event) -> str:
    """Returns what an event says besides its time and its kind, in one line."""
    return ", ".join(
        f"{key} {value}"
        for key, value in {**event, **event.get("seconds", {})}.items()
        if key not in _NOT_IN_WORDS and value is not None
    )


class JsonlTail:
    """Reads what has been added to one or several files of lines since the last time.

    A file that was cut back (the metrics of a resumed run) is read again, and lines that were seen are passed over.

    Args:
        folder: of the run.
        prefix: files whose names begin so: "events", "metrics.jsonl".
        from_now: passes over what is there already.
    """

    def __init__(self, folder: Folder, prefix: str, *, from_now: bool) -> None:
        self._folder, self._prefix = folder, prefix
        self._offsets: dict[str, int] = {}
        self._seen: set[str] = set()
        if from_now:
            self.read()

    def read(self) -> list[Event]:
        """Returns the new objects; half a line waits for its other half, and all where one file cannot be read."""
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
    """Objects of whole lines, and how many bytes they took. A line torn by a crash is passed over."""
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
