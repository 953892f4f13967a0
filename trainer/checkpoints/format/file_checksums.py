"""Size and checksum of a file. Imports no torch.

The checksum is XXH3-128, chosen for speed: it detects bit rot and torn writes, not tampering.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ...errors import CheckpointError
from .strict_json import parse_json
from .threads import in_threads

_ALGORITHM = "xxh3_128"
# Small enough that a piece just read from disk is still in the CPU cache when it is hashed.
PIECE_BYTES = 1 << 20
_MOST_HEADER_BYTES = 100_000_000  # the limit of safetensors


@dataclass(frozen=True, slots=True)
class FileChecksum:
    """Size and checksum of a file.

    The checksum of a safetensors file is that of the checksums of its header and of each tensor in their order, 16
    bytes each, so that tensors are read and verified in parallel, and one pass gives the digest of each.

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
        with path.open("rb", buffering=0) as file:
            descriptor, size = file.fileno(), os.fstat(file.fileno()).st_size
            sections: Sequence[tuple[int, int]] = [(0, size)]
            if path.suffix == ".safetensors":
                try:
                    begin, entries = read_header(descriptor, path.name)
                    sections = sections_of(begin, entries, size)
                except CheckpointError:
                    pass  # no such file any more: its checksum as that of any file will differ
            digests = in_threads(
                lambda section: digest_of_section(descriptor, *section),
                sections,
                lambda section: section[1] - section[0],
            )
            return cls.of_sections(size, digests)

    @classmethod
    def of_bytes(cls, content: bytes) -> FileChecksum:
        """Return size and checksum of a file with this content, other than a safetensors file."""
        return cls.of_sections(len(content), [xxhash.xxh3_128_digest(content)])

    @classmethod
    def of_sections(cls, size_bytes: int, digests: Iterable[bytes]) -> FileChecksum:
        """Return size and checksum of a file with sections of these XXH3-128, in their order."""
        first, *others = digests
        digest = xxhash.xxh3_128_digest(b"".join((first, *others))) if others else first
        return cls(size_bytes, f"{_ALGORITHM}:{digest.hex()}")


def read_header(descriptor: int, name: str) -> tuple[int, dict[str, Any]]:
    """Read the header of a safetensors file; return where the data begins, and the entries of the tensors.

    Raises:
        CheckpointError: it is too long, or not JSON.
    """
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if length > min(size, _MOST_HEADER_BYTES):
        raise CheckpointError(f"{name} has a header of {length} bytes, and {size} in all")
    entries = parse_json(os.pread(descriptor, length, 8), name, tensor_bytes=size)
    if not isinstance(entries, dict):
        raise CheckpointError(f"{name} has a header that is no object")
    return 8 + length, {tensor: entry for tensor, entry in entries.items() if tensor != "__metadata__"}


def sections_of(data_begin: int, entries: Mapping[str, Any], size_bytes: int) -> list[tuple[int, int]]:
    """Return begin and end of the header and of each tensor that is not empty; together they are all of the file.

    Raises:
        CheckpointError: they are not.
    """
    sections, end = [(0, data_begin)], data_begin
    try:
        offsets = sorted((begin, end) for begin, end in (each["data_offsets"] for each in entries.values()))
        for begin, stop in offsets:
            if type(begin) is not int or type(stop) is not int or data_begin + begin != end or stop < begin:
                raise ValueError(f"a tensor at {begin} to {stop}, after one that ends at {end - data_begin}")
            if stop > begin:
                sections.append((end, data_begin + stop))
                end = data_begin + stop
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the header does not describe the file ({type(error).__name__}: {error})") from error
    if end != size_bytes:
        raise CheckpointError(f"the header describes {end} bytes of {size_bytes}")
    return sections


def digest_of_section(descriptor: int, begin: int, end: int, into: memoryview | None = None) -> bytes:
    """Read a part of a file, and return XXH3-128 of what was read.

    Args:
        descriptor: of the file.
        begin: position in the file.
        end: position after the part.
        into: memory of this size for the content, which by default is not kept.

    Raises:
        CheckpointError: the file ends before.
    """
    hasher = xxhash.xxh3_128()
    scratch = memoryview(bytearray(min(end - begin, PIECE_BYTES))) if into is None else into
    at = begin
    while at < end:
        piece = scratch[: end - at] if into is None else into[at - begin :][:PIECE_BYTES]
        # The kernel copies, without a page fault for each page of the file.
        if not (count := os.preadv(descriptor, [piece], at)):
            raise CheckpointError(f"the file ends at {at}, and not at {end}")
        hasher.update(piece[:count])
        at += count
    return hasher.digest()


def check_regular(path: Path) -> None:
    """Raise CheckpointError if a path is a symbolic link, a pipe or a device, which a checkpoint never has."""
    mode = os.lstat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise CheckpointError(f"{path} is no regular file")
