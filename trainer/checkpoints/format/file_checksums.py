"""Size and checksum of a file. Imports no torch.

The checksum is XXH3-128, chosen for speed: it detects bit rot and torn writes, not tampering.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ...errors import CheckpointError

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
        return cls(size, checksum_of(hasher))

    @classmethod
    def of_bytes(cls, content: bytes) -> FileChecksum:
        """Return size and checksum of a file with this content."""
        return cls(len(content), checksum_of(xxhash.xxh3_128(content)))


def checksum_of(hasher: xxhash.xxh3_128) -> str:
    """Return the checksum of all bytes that a hasher has got."""
    return f"{_ALGORITHM}:{hasher.hexdigest()}"


def check_regular(path: Path) -> None:
    """Raise CheckpointError if a path is a symbolic link, a pipe or a device, which a checkpoint never has."""
    mode = os.lstat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise CheckpointError(f"{path} is no regular file")
