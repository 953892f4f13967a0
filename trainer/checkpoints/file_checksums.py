"""Size and checksum of a file: of one on the disk, and of one while it is written. Knows no torch.

The checksum is XXH3 of 128 bits, the fastest of those that are well known and kept: it finds rot and torn writes, not a
forger. Earlier versions took CRC-32, which is still read.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import xxhash

from .worker_thread import WorkerThread

T = TypeVar("T")

_ALGORITHM = "xxh3_128"
# Little enough that what has been read from the disk, or for another sum, is still in the processor's cache.
_PIECE_BYTES = 1 << 20


class _Hasher(Protocol):
    def update(self, data: Any, /) -> None: ...

    def hexdigest(self) -> str: ...


class _Crc32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Any, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


_HASHERS: dict[str, Callable[[], _Hasher]] = {_ALGORITHM: xxhash.xxh3_128, "crc32": _Crc32}


@dataclass(frozen=True, slots=True)
class FileChecksum:
    """What is known of a file's bytes.

    Attributes:
        size_bytes: how many there are.
        checksum: of them, after the name of its algorithm: "xxh3_128:0123...".

    Raises:
        ValueError: the checksum is of an algorithm that this version does not know.
    """

    size_bytes: int
    checksum: str

    def __post_init__(self) -> None:
        if self.algorithm not in _HASHERS:
            raise ValueError(f"checksums of {', '.join(_HASHERS)} are known, and not {self.checksum!r}")

    @property
    def algorithm(self) -> str:
        """The name of the checksum's algorithm."""
        return self.checksum.partition(":")[0]

    @classmethod
    def of(cls, path: Path, *, algorithm: str = _ALGORITHM) -> FileChecksum:
        """Reads a file once."""
        hasher, size = _HASHERS[algorithm](), 0
        buffer = memoryview(bytearray(_PIECE_BYTES))
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                hasher.update(buffer[:count])
                size += count
        return cls(size, f"{algorithm}:{hasher.hexdigest()}")


class ChecksummedFile:
    """A file opened for writing, from its beginning to its end, that knows what was written to it.

    A sum of what was handed over also finds what the way to the disk has changed, as one of the file read back cannot.

    Args:
        file: open for writing, in binary; empty.
        helper: sums what has been or is being written.
    """

    def __init__(self, file: Any, helper: WorkerThread) -> None:
        self._file, self._helper = file, helper
        self._size = 0
        self._hasher = _HASHERS[_ALGORITHM]()

    def write(self, data: Any) -> None:
        """Writes all of it. It must stay as it is until the helper is through with it."""
        view = memoryview(data).cast("B")
        self.write_and_read(view, lambda also: also(view))

    def write_and_read(self, data: Any, read: Callable[[Callable[[Any], None]], T]) -> Future[T]:
        """Writes all of it, while the helper reads it for other purposes too; returns what comes of that.

        Args:
            data: must stay as it is until then.
            read: calls the function that it is given with all of the data, piece by piece and in order.
        """
        view = memoryview(data).cast("B")
        self._size += len(view)
        reading = self._helper.submit(lambda: read(self._hasher.update), Future())
        self._file.write(view)
        return reading

    def tell(self) -> int:
        """Where the next byte goes."""
        return self._size

    def sum(self) -> Future[FileChecksum]:
        """Size and checksum of what has been written so far, once the helper is through with it."""
        size = self._size
        return self._helper.submit(lambda: FileChecksum(size, f"{_ALGORITHM}:{self._hasher.hexdigest()}"), Future())
