"""Lines appended to an object store, as numbered segments that a background thread writes once each."""

from __future__ import annotations

import re
import threading
import time
import warnings
from typing import Any

_FLUSH_EVERY_S = 3.0
# Runs of days would otherwise leave a hundred thousand segments, and each costs a reader a request.
_FLUSH_AT_LEAST_EVERY_S = 60.0
_FLUSH_BYTES = 1 << 20
_MAX_PENDING_BYTES = 16 << 20
_RETRY_AFTER_S = 2.0


class SegmentWriter:
    """Writer of `<stem>-00001.<suffix>` and so on beside the URI `<stem>.<suffix>`. Only `flush` and `close` wait.

    Lines stay in memory until they are written: lines of 3 seconds, of up to a minute after many segments, or 1 MiB
    make a segment. A failed write is retried every 2 seconds. After 16 MiB of unwritten lines, new ones are dropped.

    Args:
        uri: fsspec URI.
        flush_every_s: seconds between segments at first.
        max_pending_bytes: bound of the unwritten lines in bytes.
    """

    def __init__(
        self, uri: str, *, flush_every_s: float = _FLUSH_EVERY_S, max_pending_bytes: int = _MAX_PENDING_BYTES
    ) -> None:
        self._uri, self._flush_every_s, self._max_pending_bytes = uri, flush_every_s, max_pending_bytes
        self._pending: list[str] = []
        # A write that failed may have succeeded in the store: it is repeated under its number with the same lines.
        self._sending: list[str] = []
        self._bytes = self._sending_bytes = 0
        self._number: int | None = None
        self._dropped = 0
        self._error: Exception | None = None
        self._is_warned = False
        self._flush_now = self._is_closing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def append(self, line: str, *, always: bool = False) -> None:
        """Add a line, in memory. Warn once if the store fails.

        Args:
            line: without a line break.
            always: whether the line is kept even if there is no memory left for lines.
        """
        size = len(line.encode()) + 1
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_all, name="headway-segments", daemon=True)
                self._thread.start()
            if not always and self._bytes + size > self._max_pending_bytes:
                self._dropped += 1
            else:
                self._pending.append(line)
                self._bytes += size
                self._changed.notify_all()
            error = self._error
        if error is not None and not self._is_warned:
            self._is_warned = True
            warnings.warn(
                f"{self._uri} cannot be written; its records are kept in memory and retried: "
                f"{type(error).__name__}: {error}",
                stacklevel=2,
            )

    def pending(self) -> list[str]:
        """Return the lines that are not known to be written."""
        with self._changed:
            return [*self._sending, *self._pending]

    def flush_soon(self) -> None:
        """Let the thread write all lines now; return at once."""
        with self._changed:
            self._flush_now = True
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all lines are written; return whether they are."""
        self.flush_soon()
        with self._changed:
            return self._changed.wait_for(lambda: not (self._pending or self._sending), timeout_s)

    def close(self, timeout_s: float) -> None:
        """Write all lines and end the thread. Warn about lines that are lost after `timeout_s` seconds."""
        is_written = self.flush(timeout_s)
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            left = len(self._sending) + len(self._pending)
        if not is_written or self._dropped:
            reason = f"{type(self._error).__name__}: {self._error}" if self._error else "the store does not answer"
            warnings.warn(
                f"{left + self._dropped} records of {self._uri} are lost: {self._dropped} did not fit into memory, "
                f"{left} could not be written within {timeout_s:g} s ({reason})",
                stacklevel=2,
            )

    def _write_all(self) -> None:
        next_at_s = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._sending or self._is_closing)
                self._changed.wait_for(self._is_due, max(0.0, next_at_s - time.monotonic()))
                if self._is_closing:
                    return
                if not self._sending:
                    self._sending, self._pending = self._pending, []
                    self._sending_bytes = self._bytes
                lines = self._sending
            try:
                self._write(lines)
            except Exception as error:  # each file system has its own exceptions
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._is_closing, _RETRY_AFTER_S)
                continue
            with self._changed:
                self._bytes -= self._sending_bytes
                self._sending, self._error = [], None
                self._flush_now = self._flush_now and bool(self._pending)
                self._changed.notify_all()
            every_s = self._flush_every_s * (1 + (self._number or 0) / 100)
            next_at_s = time.monotonic() + min(every_s, max(_FLUSH_AT_LEAST_EVERY_S, self._flush_every_s))

    def _is_due(self) -> bool:
        return self._is_closing or self._flush_now or self._bytes >= _FLUSH_BYTES

    def _write(self, lines: list[str]) -> None:
        from fsspec.core import url_to_fs

        fs, path = url_to_fs(self._uri)
        if self._number is None:
            fs.makedirs(fs._parent(path), exist_ok=True)
            self._number = max((_number(each) for each in _segments(fs, path)), default=0) + 1
        stem, _, suffix = path.rpartition(".")
        fs.pipe_file(f"{stem}-{self._number:05d}.{suffix}", "".join(f"{line}\n" for line in lines).encode())
        self._number += 1


def read_segments(uri: str) -> list[str]:
    """Return the lines of all segments in order, after the lines of an object at the URI itself."""
    from fsspec.core import url_to_fs

    fs, path = url_to_fs(uri)
    names = _segments(fs, path)
    # `cat` reads the objects of a list in parallel.
    texts: dict[str, bytes] = fs.cat(names) if names else {}
    try:
        whole = [fs.cat_file(path)]
    except FileNotFoundError:
        whole = []
    contents = [*whole, *(texts[name] for name in names)]
    return [line for text in contents for line in text.decode(errors="replace").split("\n")[:-1]]


def _segments(fs: Any, path: str) -> list[str]:
    stem, _, suffix = path.rpartition(".")
    pattern = re.compile(rf"{re.escape(stem.rpartition('/')[2])}-\d{{5,}}\.{re.escape(suffix)}")
    parent = fs._parent(path)
    fs.invalidate_cache(parent)
    try:
        found = [str(each) for each in fs.ls(parent, detail=False)]
    except FileNotFoundError:
        return []
    return sorted((name for name in found if pattern.fullmatch(name.rpartition("/")[2])), key=_number)


def _number(name: str) -> int:
    return int(name.rpartition("-")[2].partition(".")[0])
