"""Size and checksum of a file, on disk or while it is written. Imports no torch.

The checksum is XXH3-128, chosen for speed: it detects bit rot and torn writes, not tampering.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from .worker_thread import WorkerThread

T = TypeVar("T")

_ALGORITHM = "xxh3_128"
# Small enough that a piece just read, from disk or for another checksum, is still in the CPU cache.
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileChecksum:
    """Size and checksum of a file.

    Attributes:
        size_bytes: the size.
        checksum: "xxh3_128:" and 32 hex digits.

    Raises:
        ValueError: `checksum` names another algorithm.
    """

    size_bytes: int
    checksum: str

    def __post_init__(self) -> None:
        if not self.checksum.startswith(f"{_ALGORITHM}:"):
            raise ValueError(f"checksum must be {_ALGORITHM}:<hex digits>, got {self.checksum!r}")

    @classmethod
    def of(cls, path: Path) -> FileChecksum:
        """Read a file once and return its size and checksum."""
        hasher, size = xxhash.xxh3_128(), 0
        buffer = memoryview(bytearray(_PIECE_BYTES))
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                hasher.update(buffer[:count])
                size += count
        return cls(size, f"{_ALGORITHM}:{hasher.hexdigest()}")


class ChecksummedFile:
    """A file that is written sequentially, with a checksum of the bytes written.

    A checksum of the bytes in memory also detects corruption on the way to the disk; a checksum of the file read back
    does not.

    Args:
        file: an empty file opened for binary writing.
        helper: thread that computes the checksum.
    """

    def __init__(self, file: Any, helper: WorkerThread) -> None:
        self._file, self._helper = file, helper
        self._size = 0
        self._hasher = xxhash.xxh3_128()

    def write(self, data: Any) -> None:
        """Write bytes. They must not change until the helper has read them."""
        view = memoryview(data).cast("B")
        self.write_and_read(view, lambda also: also(view))

    def write_and_read(self, data: Any, read: Callable[[Callable[[Any], None]], T]) -> Future[T]:
        """Write bytes while the helper reads them; return the result of `read`.

        Args:
            data: bytes that must not change until the future is done.
            read: called with a function, to which it must pass all of the data in order, piece by piece.
        """
        view = memoryview(data).cast("B")
        self._size += len(view)
        reading = self._helper.submit(lambda: read(self._hasher.update), Future())
        self._file.write(view)
        return reading

    def tell(self) -> int:
        """Return the position of the next byte."""
        return self._size

    def sum(self) -> Future[FileChecksum]:
        """Return size and checksum of the bytes written so far."""
        size = self._size
        return self._helper.submit(lambda: FileChecksum(size, f"{_ALGORITHM}:{self._hasher.hexdigest()}"), Future())
