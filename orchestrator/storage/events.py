"""The events of a run, one JSON object per line, written by its driver and its workers."""

from __future__ import annotations

import json
import threading
import time
import uuid
from typing import Any, Literal

from headway.trainer.redaction import redact

from .folder import Folder

Event = dict[str, Any]
# Details that are meant for programs, or too long for a line.
_NOT_DESCRIBED = ("time", "event", "start", "workers", "retrying", "seconds", "spent", "since", "data", "failure")

# An object is replaced with each of its events: a larger one costs more per event, a smaller one readers more requests.
_SEGMENT_BYTES = 8 << 10


class EventWriter:
    """Writer of a run's events, which threads may share.

    On a local disk all writers append to `events.jsonl`. Elsewhere each writer has its own files: a network file system
    does not append atomically between machines, so there it appends to `events-<writer>.jsonl`. Object stores cannot
    append: there it replaces a segment, `events-<writer>-<random>-00001.jsonl`, until this has 8 KiB, and begins the
    next.

    Args:
        folder: the run's folder.
        writer: name of this writer, unique among concurrent writers.
        start: the driver's lease, written into each event, so that the events of its start are known without clocks.
    """

    def __init__(self, folder: Folder, writer: str, *, start: str = "") -> None:
        self._folder, self._writer = folder, writer
        self._start = {"start": start} if start else {}
        self._id = uuid.uuid4().hex[:8]
        self._number, self._segment = 1, ""
        self._lock = threading.Lock()

    def add(self, kind: str, **details: Any) -> None:
        """Write one event, with its time in seconds since 1970, and without secrets.

        Raises:
            StorageError: the event cannot be written; it may be added again.
        """
        shown = {name: redact(value) for name, value in details.items()}
        line = json.dumps({"time": time.time(), "event": kind, **self._start, **shown}, default=str)
        if self._folder.is_local:
            self._folder.append("events.jsonl" if self._folder.is_disk else f"events-{self._writer}.jsonl", line)
            return
        with self._lock:
            segment = f"{self._segment}{line}\n"
            self._folder.write(f"events-{self._writer}-{self._id}-{self._number:05d}.jsonl", segment)
            self._segment = segment
            if len(segment) >= _SEGMENT_BYTES:
                self._number, self._segment = self._number + 1, ""


def read_events(folder: Folder) -> list[Event]:
    """Return all events of a run, earliest first."""
    texts = folder.map(folder.read, folder.files("events"))
    events = [event for text in texts for event in _parsed((text or "").encode())[0]]
    return sorted(events, key=lambda event: event.get("time", 0.0))


def describe(event: Event) -> str:
    """Return the details of an event as one line, without its time and kind."""
    return ", ".join(
        f"{key} {value}"
        for key, value in {**event, **event.get("seconds", {})}.items()
        if key not in _NOT_DESCRIBED and value is not None
    )


class JsonlTail:
    """Reader of lines added to the events or the metrics of a run since its last read.

    The metrics of a run that resumes or rewinds are cut back and written again. Records not newer than those already
    returned are skipped: by attempt, then by time, which the same machine measures within an attempt.

    Args:
        folder: the run's folder.
        prefix: "events" or "metrics".
        from_now: skip existing lines.
    """

    def __init__(self, folder: Folder, prefix: Literal["events", "metrics"], *, from_now: bool) -> None:
        self._folder, self._prefix = folder, prefix
        self._offsets: dict[str, int] = {}
        self._newest: tuple[float, ...] = ()
        if from_now:
            self.read()

    def read(self) -> list[Event]:
        """Return the new objects, earliest first. An incomplete line is left for the next read.

        Raises:
            StorageError: a file cannot be read; no object is lost, the next call returns them all.
        """
        offsets = dict(self._offsets)
        grown: list[str] = []
        for name, size in self._folder.sizes(self._prefix).items():
            if not name.endswith(".jsonl"):
                continue
            if size < offsets.get(name, 0):
                offsets[name] = 0
            if size > offsets.get(name, 0):
                grown.append(name)
        found: list[Event] = []
        contents = self._folder.map(lambda name: self._folder.read_from(name, offsets.get(name, 0))[0], grown)
        for name, data in zip(grown, contents, strict=True):
            events, used = _parsed(data)
            offsets[name] = offsets.get(name, 0) + used
            found += events
        self._offsets = offsets
        if self._prefix == "metrics":
            # Lines of segments without a step are not records.
            fresh = {key: each for each in found if "step" in each and (key := _age(each)) > self._newest}
            self._newest = max(fresh, default=self._newest)
            return [fresh[key] for key in sorted(fresh)]
        return sorted(found, key=lambda event: event.get("time", 0.0))


def _age(record: Event) -> tuple[float, ...]:
    return record.get("attempt", 0), record.get("time", 0.0), record["step"]


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
