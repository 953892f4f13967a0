"""`Cache`: remote data on a local disk, as the byte ranges that are read, up to a number of bytes.

A range is stored when it is read for the first time, so the first epoch reads no more than without a cache, and no file
is needed as a whole. Its name is a digest of its file, the version of the file, and the place in it: a file that is
rewritten has other names, and its old ranges leave as the least recently used ones. fsspec's own caches have no limit.

Runs in Ray Data's workers too, so it imports neither torch nor Ray.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import xxhash

from .errors import DataError
from .paths import Found, PathLike

logger = logging.getLogger("headway.datasets")

# What tells versions of a file apart, in the words of the file systems of fsspec; the first that there is decides.
# Digests come before times, which S3 gives in seconds for a file and in milliseconds in a listing.
_VERSIONS = (
    *("ETag", "etag", "md5Hash", "Content-MD5", "Digest", "generation", "blob_id", "sha", "CRC"),
    *("mtime", "LastModified", "last_modified", "Last-Modified", "updated", "modified", "created"),
)
_LOCK, _TOTAL = ".lock", ".total"
_ENTRY = re.compile(r"[0-9a-f]{32}(\.writing)?")
_CHECKSUM_BYTES = 8
_BLOCK_BYTES = 4096
# So much of the limit is freed at a time, because finding the oldest entries lists all of them.
_FREED = 0.05
# How long a process stores nothing after it has found nothing to remove.
_FULL_S = 60.0

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

_full_until: dict[str, float] = {}
_warned: set[str] = set()


@dataclass(frozen=True)
class Cache:
    """A cache of remote data on a local disk, for the `cache` of `Parquet`, `JsonLines`, `WebDataset` or `Images`.

    All processes of a machine, all sources and all runs may share a folder; each machine fills its own. Entries are
    compared with a checksum when they are read. A file that has changed is read again, as its ETag or its time tells.

    If an entry does not fit, those that were not used since the run started are removed, the least recently used first.
    The others are kept, because each is needed once per epoch: what does not fit is read remotely in every epoch.

    Args:
        folder: a folder on a local disk, created if it does not exist. Other files in it are left alone.
        max_bytes: limit of all entries together, counted in blocks of 4 KiB.

    Example:
        >>> from headway.datasets.cache import Cache
        >>> from headway.datasets.stream import ParquetStream
        >>> stream = ParquetStream("s3://bucket/train", cache=Cache("/tmp/cache", max_bytes=500 * 2**30))
    """

    folder: PathLike
    max_bytes: int

    def __post_init__(self) -> None:
        if isinstance(self.max_bytes, bool) or not isinstance(self.max_bytes, int) or self.max_bytes < 1:
            raise DataError(f"max_bytes of a Cache must be an integer >= 1, got {self.max_bytes!r}")
        if "://" in os.fspath(self.folder):
            raise DataError(f"the folder of a Cache must be on a local disk, got {self.folder}")
        object.__setattr__(self, "folder", str(Path(self.folder).expanduser().absolute()))

    def open(self) -> Entries:
        """Create the folder.

        Raises:
            DataError: it cannot be written.
        """
        try:
            Path(self.folder).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.folder).close()
        except OSError as error:
            raise DataError(
                f"cannot write the cache {self.folder} ({error.strerror or error}): set folder to one that can be "
                "written, on a local disk"
            ) from error
        return Entries(str(self.folder), self.max_bytes, time.time())


class Entries(NamedTuple):
    """The entries of a cache.

    Attributes:
        folder, max_bytes: see `Cache`.
        opened: time at which the run has opened it, in seconds since 1970. Entries that were used later are kept.
    """

    folder: str
    max_bytes: int
    opened: float

    def get(self, name: str) -> bytes | None:
        """Return an entry, or None if there is none. A damaged one is removed."""
        path = self._path(name)
        try:
            # A file that is open can be removed by another process, and is still read to its end.
            with path.open("rb") as file:
                checksum, data = file.read(_CHECKSUM_BYTES), file.read()
                if checksum == xxhash.xxh3_64_digest(data):
                    os.utime(file.fileno())
                    return data
            logger.warning("an entry of the cache %s is damaged, and is read again", self.folder)
            path.unlink(missing_ok=True)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._warn(error)
        return None

    def put(self, name: str, data: bytes) -> None:
        """Store an entry if there is room. A failure is logged once, because training can continue without a cache."""
        if time.monotonic() < _full_until.get(self.folder, 0.0):
            return
        try:
            with self._locked():
                self._put(self._path(name), data)
        except OSError as error:
            self._warn(error)

    def _put(self, path: Path, data: bytes) -> None:
        if path.exists():
            return
        size = _on_disk(_CHECKSUM_BYTES + len(data))
        total = self._read_total()
        if total is None or total + size > self.max_bytes:
            total = self._make_room(size, self.max_bytes)
            if total + size > self.max_bytes:
                self._write_total(total)
                self._pause(f"its entries take max_bytes ({self.max_bytes})")
                return
        try:
            self._store(path, data, total + size)
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
            total = self._make_room(size, None)
            try:
                self._store(path, data, total + size)
            except OSError as again:
                if again.errno not in _NO_SPACE:
                    raise
                self._pause(f"its disk is, below max_bytes ({self.max_bytes}). Free some of it, or lower max_bytes")

    def _store(self, path: Path, data: bytes, total: int) -> None:
        # First, so that a process that is killed here has counted too much. The next removal counts again.
        self._write_total(total)
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_suffix(".writing")
        try:
            with temporary.open("wb") as file:
                file.write(xxhash.xxh3_64_digest(data))
                file.write(data)
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def _make_room(self, size: int, limit: int | None) -> int:
        """Remove the least recently used of the entries that this run has not used; return the bytes of the others.

        Args:
            size: bytes to make room for.
            limit: of all entries; None for what they take now, if there is no more space.
        """
        entries = []
        for folder in os.scandir(self.folder):
            if not re.fullmatch("[0-9a-f]{2}", folder.name) or not folder.is_dir():
                continue
            for each in os.scandir(folder):
                if not _ENTRY.fullmatch(each.name):
                    continue
                with suppress(FileNotFoundError):  # damaged, and removed by a reader
                    if each.name.endswith(".writing"):  # left by a process that was killed: this one holds the lock
                        os.unlink(each)
                    else:
                        about = each.stat()
                        entries.append((about.st_mtime, _on_disk(about.st_size), each.path))
        total = sum(size for _, size, _ in entries)
        limit = total if limit is None else limit
        if total + size > limit:
            for used, entry_size, path in sorted(entries):
                if used >= self.opened or total <= limit * (1 - _FREED) - size:
                    break
                with suppress(FileNotFoundError):
                    os.unlink(path)
                total -= entry_size
        return total

    @contextmanager
    def _locked(self) -> Iterator[None]:
        Path(self.folder).mkdir(parents=True, exist_ok=True)  # a reading task may be on another machine
        with (Path(self.folder) / _LOCK).open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _read_total(self) -> int | None:
        """Return the bytes of all entries, at least; None if they must be counted."""
        try:
            return int((Path(self.folder) / _TOTAL).read_text())
        except (FileNotFoundError, ValueError):
            return None

    def _write_total(self, total: int) -> None:
        path = Path(self.folder) / _TOTAL
        path.with_suffix(".writing").write_text(str(total))
        path.with_suffix(".writing").replace(path)

    def _path(self, name: str) -> Path:
        return Path(self.folder) / name[:2] / name

    def _warn(self, error: OSError) -> None:
        if self.folder not in _warned:
            _warned.add(self.folder)
            logger.warning("the cache %s does not work, so data is read remotely: %s", self.folder, error)

    def _pause(self, why: str) -> None:
        """Store nothing for a while, because each attempt takes time."""
        _full_until[self.folder] = time.monotonic() + _FULL_S
        if f"full {self.folder}" not in _warned:
            _warned.add(f"full {self.folder}")
            logger.warning(
                "the cache %s is full, and what does not fit is read remotely in every epoch: %s", self.folder, why
            )


class Cached(NamedTuple):
    """A file that is read through a cache.

    Attributes:
        entries: the cache.
        size: of the file, in bytes.
        version: changes when the file does; see `version_of`.
    """

    entries: Entries
    size: int
    version: str


class CachedFile(io.RawIOBase):
    """A file whose reads are looked up in a cache by their place and length, and stored there.

    So they are found again if the same places are read, as for fragments. The file itself is opened when a read
    is not found.

    Args:
        path: names the file.
        cached: where to look.
        place: returns its file system, and its path there.
    """

    def __init__(self, path: str, cached: Cached, place: Callable[[], tuple[Any, str]]) -> None:
        super().__init__()
        self._path, self._cached, self._place = path, cached, place
        self._position = 0
        # The file system, too: one of an archive closes the archive when it is freed.
        self._fs: Any = None
        self._remote: Any = None

    def readable(self) -> bool:  # noqa: D102
        return True

    def seekable(self) -> bool:  # noqa: D102
        return True

    def tell(self) -> int:  # noqa: D102
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:  # noqa: D102
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._cached.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next bytes, all that there are unless the file ends.

        Raises:
            DataError: the file has changed since its version was determined.
            OSError: it cannot be read.
        """
        left = max(0, self._cached.size - self._position)
        size = left if size is None or size < 0 else min(size, left)
        if not size:
            return b""
        name = entry_name(self._path, self._cached.version, self._position, size)
        data = self._cached.entries.get(name)
        if data is None or len(data) != size:
            data = self._fetch(size)
            self._cached.entries.put(name, data)
        self._position += size
        return data

    def readinto(self, buffer: Any, /) -> int:  # noqa: D102
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:  # noqa: D102
        return self.read()

    def close(self) -> None:  # noqa: D102
        if self._remote is not None:
            self._remote.close()
            self._remote = None
        super().close()

    def _fetch(self, size: int) -> bytes:
        if self._remote is None:
            self._fs, inner = self._place()
            self._remote = self._fs.open(inner, "rb", cache_type="none")
            details = getattr(self._remote, "details", None) or self._fs.info(inner)
            if version_of(details, self._path) != self._cached.version:
                raise DataError(f"{self._path} has changed since the run started. Start a new run for new data")
        self._remote.seek(self._position)
        data: bytes = self._remote.read(size)
        if len(data) != size:
            raise OSError(f"{len(data)} bytes instead of {size} at {self._position}")
        return data


def entry_name(path: str, version: str, start: int, size: int) -> str:
    """Return the name of the entry for `size` bytes from `start` of a file."""
    return hashlib.sha256(f"{path}\0{version}\0{start}\0{size}".encode()).hexdigest()[:32]


def version_of(about: Mapping[str, Any], path: str) -> str:
    """Return what changes when a file does: its size, and its digest or its time.

    Args:
        about: what its file system tells of it.
        path: for the error.

    Raises:
        DataError: the file system tells neither.
    """
    told = next((f"{name} {about[name]}" for name in _VERSIONS if about.get(name)), None)
    if told is None or about.get("size") is None:
        raise DataError(
            f"{path} cannot be cached: its file system tells no size, or neither an ETag nor a time of change, so a "
            "changed file would not be noticed. Remove cache"
        )
    return f"{about['size']} {told}"


def cached_files(cache: Cache | None, found: Sequence[Found]) -> list[Cached | None]:
    """Open a cache for some files; return None for each file if there is no cache.

    Raises:
        DataError: the cache cannot be written, or the version of a file cannot be determined.
    """
    if cache is None:
        return [None] * len(found)
    entries = cache.open()

    def look(each: Found) -> Cached:
        try:
            about = each.fs.info(each.inner)
        except OSError as error:
            raise DataError(f"cannot read {each.path}: {type(error).__name__}: {error}") from error
        return Cached(entries, int(about["size"] or 0), version_of(about, each.path))

    for fs in {id(each.fs): each.fs for each in found}.values():
        fs.invalidate_cache()  # A listing of this process may be older than the files.
    with ThreadPoolExecutor(max_workers=min(32, len(found))) as pool:
        return list(pool.map(look, found))


def check_fits(cache: Cache | None, largest_bytes: int, name: str) -> None:
    """Check that a cache can hold what is read at once.

    Args:
        cache: the cache, or None.
        largest_bytes: of the reads of the data.
        name: of the data, for the error.

    Raises:
        DataError: it is smaller.
    """
    if cache is not None and (least := _on_disk(_CHECKSUM_BYTES + largest_bytes)) > cache.max_bytes:
        raise DataError(
            f"max_bytes of the Cache is {cache.max_bytes}, but {name} has parts that are read at once of up to "
            f"{least} bytes: set max_bytes to at least that, and best to the size of the data"
        )


def open_data(path: str, cached: Cached | None) -> Any:
    """Open a data file for reading bytes, through the cache if there is one."""
    if cached is not None:
        return CachedFile(path, cached, lambda: fsspec.core.url_to_fs(path))
    return open(path, "rb") if "://" not in path else fsspec.open(path, "rb")


def _on_disk(size: int) -> int:
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES
