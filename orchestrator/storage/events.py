"""The events of a run, one JSON object per line, written by its driver and its workers."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from array import array
from typing import Any

from headway.trainer.redaction import redact

from .folder import Folder

Event = dict[str, Any]
# Details that are meant for programs, or too long for a line.
_NOT_DESCRIBED = ("time", "event", "start", "workers", "retrying", "seconds", "spent", "since", "data", "failure")


class EventWriter:
    """Writer of a run's events, which threads may share.

    On a local disk all writers append to `events.jsonl`. Elsewhere each writer has its own file
    `events-<writer>.jsonl`: a network file system does not append atomically between machines, and an object store
    cannot append, so that there the file is replaced.

    Args:
        folder: the run's folder.
        writer: name of this writer, unique among concurrent writers.
        start: the driver's lease, written into each event, so that those of its start are known without clocks.
    """

    def __init__(self, folder: Folder, writer: str, *, start: str = "") -> None:
        self._folder, self._writer = folder, writer
        self._start = {"start": start} if start else {}
        self._own: str | None = None
        self._lock = threading.Lock()

    def add(self, kind: str, **details: Any) -> None:
        """Write one event, with its time in seconds since 1970, and without secrets."""
        shown = {name: redact(value) for name, value in details.items()}
        line = json.dumps({"time": time.time(), "event": kind, **self._start, **shown}, default=str)
        name = f"events-{self._writer}.jsonl"
        if self._folder.is_local:
            self._folder.append("events.jsonl" if self._folder.is_disk else name, line)
            return
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
    """Return the details of an event as one line, without its time and kind."""
    return ", ".join(
        f"{key} {value}"
        for key, value in {**event, **event.get("seconds", {})}.items()
        if key not in _NOT_DESCRIBED and value is not None
    )


class JsonlTail:
    """Reader of lines added to JSON Lines files since its last read.

    A truncated file (the metrics of a resumed run) is read again from its start; lines seen before are skipped.

    Args:
        folder: the run's folder.
        prefix: prefix of the files' names, e.g. "events" or "metrics.jsonl".
        from_now: skip existing lines.
    """

    def __init__(self, folder: Folder, prefix: str, *, from_now: bool) -> None:
        self._folder, self._prefix = folder, prefix
        self._offsets: dict[str, int] = {}
        # One number per line, because a run may have millions of lines.
        self._digests = array("Q")
        if from_now:
            self.read()

    def read(self) -> list[Event]:
        """Return the new objects, earliest first. An incomplete line is left for the next read.

        Raises:
            StorageError: a file cannot be read; no object is lost, the next call returns them all.
        """
        found: list[Event] = []
        offsets = dict(self._offsets)
        is_truncated = False
        names = [self._prefix] if "." in self._prefix else self._folder.files(self._prefix)
        for name in names:
            offset = offsets.get(name, 0)
            data, size = self._folder.read_from(name, offset)
            if size < offset:
                data, size = self._folder.read_from(name, 0)
                offset, is_truncated = 0, True
            events, used = _parsed(data)
            offsets[name] = offset + used
            found += events
        self._offsets = offsets
        seen = set(self._digests) if is_truncated else set()
        fresh: list[Event] = []
        for event in found:
            if (digest := _digest(event)) not in seen:
                self._digests.append(digest)
                fresh.append(event)
        return sorted(fresh, key=lambda event: event.get("time", 0.0))


def _digest(event: Event) -> int:
    line = json.dumps(event, sort_keys=True).encode()
    return int.from_bytes(hashlib.blake2b(line, digest_size=8).digest())


def _parsed(data: bytes) -> tuple[list[Event], int]:
    """Return the objects of complete lines, and the size of these lines in bytes. Skip lines torn by a crash."""
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
