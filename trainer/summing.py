"""Size and checksum of a file while it is written: the thread that sums runs beside the one that writes."""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .manifest import FileSum

_WORTH_A_THREAD_BYTES = 1 << 18


class SummedFile:
    """A file opened for writing, from its beginning to its end, that knows what was written to it.

    A save of 200 MB to memory, on two busy cores: 0.32 s so, 0.43 s with a sum of the file read back. And a sum of what
    was handed over also finds what the way to the disk has changed.

    Args:
        file: open for writing, in binary; empty.
        helper: one thread, which sums large pieces while they are written.
    """

    def __init__(self, file: Any, helper: ThreadPoolExecutor) -> None:
        self._file, self._helper = file, helper
        self._size, self._crc = 0, 0

    @property
    def sum(self) -> FileSum:
        """Size and checksum of what has been written."""
        return FileSum(self._size, self._crc)

    def write(self, data: Any) -> int:
        """Writes all of it."""
        view = memoryview(data).cast("B")
        if len(view) < _WORTH_A_THREAD_BYTES:
            self._crc = zlib.crc32(view, self._crc)
            self._file.write(view)
        else:
            summing = self._helper.submit(zlib.crc32, view, self._crc)
            try:
                self._file.write(view)
            finally:
                self._crc = summing.result()  # in any case: whoever gave the memory takes it back
        self._size += len(view)
        return len(view)

    def tell(self) -> int:
        """Where the next byte goes."""
        return self._size

    def flush(self) -> None:
        """Hands to the system what is still in a buffer."""
        self._file.flush()

    def close(self) -> None:
        """Closes it; as often as somebody likes."""
        self._file.close()
