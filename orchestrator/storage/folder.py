"""A folder of small files on a disk or at an fsspec URI: read, replace atomically, append."""

from __future__ import annotations

import copy
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from headway.trainer.checkpoints.storage import open_storage
from headway.trainer.errors import ConfigError
from headway.trainer.redaction import redact_urls

from ..errors import StorageError

T = TypeVar("T")
U = TypeVar("U")
# Object stores take 20 to 100 ms per request, and serve many in parallel.
_MAX_PARALLEL_READS = 32
STORAGE_TIMEOUT_S = 60.0
"""How long a storage may be unavailable before a run fails."""
_RETRY_EVERY_S = 1.0


def absolute(place: str | os.PathLike[str]) -> str:
    """Return an absolute path or a URI, because workers have another current directory.

    Raises:
        ConfigError: the URI contains a password, or is memory://, which only one process can see.
    """
    text = os.fspath(place)
    if (shown := redact_urls(text)) != text:
        raise ConfigError(
            f"{shown} contains a password or a token, which would be in every record and message: leave it out, and "
            "set it in the environment or in ~/.config/fsspec (docs/configuration.md, Secrets)"
        )
    if "://" not in text:
        return os.path.abspath(os.path.expanduser(text))
    scheme, _, rest = text.partition("://")
    if scheme == "memory":
        raise ConfigError(
            f"{text} is in the memory of one process, and workers cannot access it: use a folder or another URI"
        )
    return os.path.abspath(rest) if scheme in ("file", "local") else text.rstrip("/")


def join(place: str, *names: str) -> str:
    """Append names to a path or a URI."""
    return "/".join((place.rstrip("/"), *names))


def access_hint(place: str, error: Exception) -> str:
    """Return what to do about an error at a URI that denies access; empty for other errors and for local folders."""
    if "://" not in place or not isinstance(error, PermissionError):
        return ""
    return (
        "; check the credentials of this machine (environment, profile or role) and its permission to list, read, "
        "write and delete objects there"
    )


def retry_storage(do: Callable[[], T]) -> T:
    """Return `do()`, retrying for up to a minute while the storage is unavailable.

    Raises:
        StorageError: the storage is still unavailable.
    """
    deadline_s = time.monotonic() + STORAGE_TIMEOUT_S
    while True:
        try:
            return do()
        except StorageError:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(_RETRY_EVERY_S)


class StorageOutage:
    """Tolerance of a polling loop for an unavailable storage: up to a minute, without blocking."""

    def __init__(self) -> None:
        self._since_s = math.inf

    def tolerate(self, poll: Callable[[], T], *, fail_now: Callable[[], bool]) -> T | None:
        """Return `poll()`, or None if it raised a `StorageError`.

        Args:
            poll: one iteration of the loop.
            fail_now: returns whether to fail immediately instead.

        Raises:
            StorageError: the storage has been unavailable for a minute.
        """
        try:
            value = poll()
        except StorageError:
            now_s = time.monotonic()
            self._since_s = min(self._since_s, now_s)
            if now_s - self._since_s > STORAGE_TIMEOUT_S or fail_now():
                raise
            return None
        self._since_s = math.inf
        return value


class Folder:
    """One folder. Each method raises a `StorageError` that names the path if it fails.

    Args:
        place: an absolute path or an fsspec URI.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        scheme, separator, rest = place.partition("://")
        # True on a local or a mounted disk.
        self.is_local = not separator or scheme in ("file", "local")
        if self.is_local:
            self._root = os.path.abspath(rest if separator else place)
            return
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem

        try:
            self._fs, self._root = url_to_fs(place)
        except (ImportError, ValueError, OSError) as error:
            raise StorageError(f"{place} cannot be used: {error}") from error
        self.is_local = isinstance(self._fs, LocalFileSystem)

    @cached_property
    def _fs(self) -> Any:
        # fsspec imports asyncio, which takes as long as listing hundreds of runs.
        from fsspec.implementations.local import LocalFileSystem

        return LocalFileSystem()

    @cached_property
    def is_disk(self) -> bool:
        """Whether it is known to be on a local disk, and not on a network file system or an object store."""
        return self.is_local and open_storage(self._root).is_disk()

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.place.rstrip("/").rpartition("/")[2]

    def path(self, name: str) -> str:
        """Return the path or URI of a file in the folder."""
        return join(self.place, name)

    def child(self, name: str) -> Folder:
        """Return a folder inside this one, without resolving the file system again."""
        child = copy.copy(self)
        child.place, child._root = self.path(name), join(self._root, name)
        # It may be a mount, or a link to one.
        child.__dict__.pop("is_disk", None)
        return child

    def map(self, do: Callable[[T], U], items: Iterable[T]) -> list[U]:
        """Return `do(item)` for each item; on an object store in parallel."""
        if self.is_local:
            return list(map(do, items))
        with ThreadPoolExecutor(_MAX_PARALLEL_READS) as pool:
            return list(pool.map(do, items))

    def prepare(self) -> None:
        """Create the folder, and check that a small file can be written, read and removed."""
        probe, text = f".probe-{uuid.uuid4().hex[:8]}", "headway"
        try:
            self._fs.makedirs(self._root, exist_ok=True)
            self._fs.pipe_file(join(self._root, probe), text.encode())
            if self._fs.cat_file(join(self._root, probe)).decode() != text:
                raise OSError("the text read back differs from the text written")
            self._fs.rm_file(join(self._root, probe))
        except Exception as error:  # each file system has its own exceptions
            hint = access_hint(self.place, error)
            raise StorageError(f"{self.place} cannot be written: {type(error).__name__}: {error}{hint}") from error

    def check_writable(self) -> None:
        """Check without writing that a local folder can be created and written."""
        if not self.is_local:
            return
        existing = next(each for each in (Path(self._root), *Path(self._root).parents) if each.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise StorageError(f"{self.place} cannot be written: {existing} is not a writable folder")

    def read(self, name: str) -> str | None:
        """Return the text of a file; None if it does not exist."""
        with self._wrap_errors(name, "read"), suppress(FileNotFoundError, NotADirectoryError):
            if self.is_local:
                with open(join(self._root, name), "rb") as file:
                    return file.read().decode()
            self._forget_listing()
            return str(self._fs.cat_file(join(self._root, name)).decode())
        return None

    def write(self, name: str, text: str, *, durable: bool = False) -> None:
        """Replace a file atomically: a reader sees the old text or the new one.

        Args:
            name: name of the file.
            text: its new content.
            durable: wait until a local file and its name are on disk, so that a power cut does not leave it empty.
        """
        with self._wrap_errors(name, "written"):
            if not self.is_local:
                # Object stores show an object only when it is complete.
                self._fs.pipe_file(join(self._root, name), text.encode())
                return
            # Threads, and hosts that share a mounted folder, may write the same file at once.
            part = Path(self._root, f".{name}.{os.getpid()}-{threading.get_ident()}-{uuid.uuid4().hex[:8]}.part")
            try:
                with part.open("w") as file:
                    file.write(text)
                    if durable:
                        file.flush()
                        os.fsync(file.fileno())
                part.replace(Path(self._root, name))
            except BaseException:
                part.unlink(missing_ok=True)
                raise
            if durable:
                _sync_folder(self._root)

    def append(self, name: str, line: str) -> None:
        """Append one line to a local file in one system call, so that several writers may append."""
        assert self.is_local, "object stores cannot append"
        with self._wrap_errors(name, "written"):
            handle = os.open(Path(self._root, name), os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                size = os.fstat(handle).st_size
                # Without a line break first, a line torn by a crash would corrupt this one.
                is_torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
                data = f"{chr(10) * is_torn}{line}\n".encode()
                if os.write(handle, data) < len(data):
                    raise OSError("no space left for a whole line")
            finally:
                os.close(handle)

    def read_from(self, name: str, offset: int) -> tuple[bytes, int]:
        """Return the bytes of a file from an offset, and its size; (b"", 0) if it does not exist."""
        with self._wrap_errors(name, "read"), suppress(FileNotFoundError):
            size = int(self._fs.size(join(self._root, name)) or 0)
            if size <= offset:
                return b"", size
            return bytes(self._fs.cat_file(join(self._root, name), start=offset, end=size)), size
        return b"", 0

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the size in bytes of each of its files with this prefix, by name, in the order of names."""
        found = {}
        for entry in self._entries():
            if (name := _name(entry)).startswith(prefix) and entry["type"] != "directory":
                size = entry.get("size")
                # Files of a disk are measured here, because listing folders does not need their sizes.
                found[name] = self._size(name) if size is None else int(size)
        return dict(sorted(found.items()))

    def _size(self, name: str) -> int:
        with self._wrap_errors(name, "read"), suppress(FileNotFoundError):
            return int(self._fs.size(join(self._root, name)) or 0)
        return 0

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        with self._wrap_errors(name, "removed"), suppress(FileNotFoundError):
            self._fs.rm_file(join(self._root, name))

    def remove_folder(self, name: str) -> None:
        """Remove a folder and its contents if it exists."""
        with self._wrap_errors(name, "removed"), suppress(FileNotFoundError):
            self._forget_listing()
            self._fs.rm(join(self._root, name), recursive=True)

    def exists(self, name: str) -> bool:
        """Return whether there is such a file or folder."""
        path = join(self._root, name)
        with self._wrap_errors(name, "read"):
            if self.is_local:
                return os.path.exists(path)
            self._forget_listing()
            return bool(self._fs.exists(path))

    def _forget_listing(self) -> None:
        """Make fsspec ask the store: a file that is not in a listing of the past counts as missing."""
        self._fs.invalidate_cache(self._root)

    def folders(self) -> list[str]:
        """Return the sorted names of its folders; empty if it does not exist."""
        return sorted(_name(entry) for entry in self._entries() if entry["type"] == "directory")

    def files(self, prefix: str) -> list[str]:
        """Return the sorted names of its files with this prefix."""
        return sorted(name for name in map(_name, self._entries()) if name.startswith(prefix))

    def _entries(self) -> list[dict[str, Any]]:
        with self._wrap_errors("", "listed"), suppress(FileNotFoundError, NotADirectoryError):
            if self.is_local:
                with os.scandir(self._root) as found:
                    return [{"name": each.name, "type": "directory" if each.is_dir() else "file"} for each in found]
            self._forget_listing()
            return list(self._fs.ls(self._root, detail=True))
        return []

    @contextmanager
    def _wrap_errors(self, name: str, done: str) -> Iterator[None]:
        """Raise any error, because each file system has its own, as a `StorageError`."""
        try:
            yield
        except Exception as error:
            path = self.path(name) if name else self.place
            raise StorageError(f"{path} cannot be {done}: {error}{access_hint(path, error)}") from error


def _sync_folder(path: str) -> None:
    """Wait until the names in a local folder are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _name(entry: dict[str, Any]) -> str:
    return str(entry["name"]).rstrip("/").rsplit("/", 1)[-1]
