"""Size and checksum of a file while it is written: the thread that sums runs beside the one that writes."""

from __future__ import annotations

import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from .manifest import FileSum


class SummedFile:
    """A file opened for writing, from its beginning to its end, that knows what was written to it.

    A sum of what was handed over also finds what the way to the disk has changed, as one of the file read back cannot.

    Args:
        file: open for writing, in binary; empty.
        helper: one thread, which sums what has been or is being written.
    """

    def __init__(self, file: Any, helper: ThreadPoolExecutor) -> None:
        self._file, self._helper = file, helper
        self._size, self._crc = 0, 0
        self._last: Future[None] | None = None

    @property
    def sum(self) -> FileSum:
        """Size and checksum of what has been written; waits for the helper."""
        if self._last is not None:
            self._last.result()
        return FileSum(self._size, self._crc)

    def write(self, data: Any) -> None:
        """Writes all of it. It must stay as it is until the helper is through with it."""
        view = memoryview(data).cast("B")
        self._size += len(view)
        self._last = self._helper.submit(self._add, view)
        self._file.write(view)

    def tell(self) -> int:
        """Where the next byte goes."""
        return self._size

    def _add(self, view: memoryview) -> None:
        self._crc = zlib.crc32(view, self._crc)
