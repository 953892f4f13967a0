"""A folder of small files, on a disk or behind an fsspec URI: read, replaced whole, appended to."""

from __future__ import annotations

import copy
import math
import os
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from headway.trainer.errors import ConfigError

from ..errors import StorageError

T = TypeVar("T")
U = TypeVar("U")
# An object store answers within 20 to 100 ms, and does not mind to be asked by many.
_AT_A_TIME = 32
STORAGE_PATIENCE_S = 60.0
"""So long a storage may be away before a run fails of it."""
_AGAIN_S = 1.0


def absolute(place: str | os.PathLike[str]) -> str:
    """Returns an absolute path, or the URI as it is: workers have another current directory.

    Raises:
        ConfigError: the place exists in one process only.
    """
    text = os.fspath(place)
    if "://" not in text:
        return os.path.abspath(os.path.expanduser(text))
    scheme, _, rest = text.partition("://")
    if scheme == "memory":
        raise ConfigError(
            f"{text} lives in the memory of one process, where workers cannot see it: give a folder or a URI"
        )
    return os.path.abspath(rest) if scheme in ("file", "local") else text.rstrip("/")


def join(place: str, *names: str) -> str:
    """Puts names below a path or a URI."""
    return "/".join((place.rstrip("/"), *names))


def retry_storage(do: Callable[[], T]) -> T:
    """Does what needs a storage, and waits up to a minute for one that is away.

    Raises:
        StorageError: it stays away.
    """
    deadline_s = time.monotonic() + STORAGE_PATIENCE_S
    while True:
        try:
            return do()
        except StorageError:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(_AGAIN_S)


class StorageOutage:
    """Passes a storage that is away over, for up to a minute: for who looks at it turn by turn, and must not wait."""

    def __init__(self) -> None:
        self._away_since_s = math.inf

    def take(self, turn: Callable[[], T], *, is_at_once: Callable[[], bool]) -> T | None:
        """Returns what one turn does, or None if a `StorageError` has ended it.

        Args:
            turn: what is done again and again.
            is_at_once: whether whoever waits has no patience left.

        Raises:
            StorageError: the storage has been away in all turns of a minute.
        """
        try:
            value = turn()
        except StorageError:
            now_s = time.monotonic()
            self._away_since_s = min(self._away_since_s, now_s)
            if now_s - self._away_since_s > STORAGE_PATIENCE_S or is_at_once():
                raise
            return None
        self._away_since_s = math.inf
        return value


class Folder:
    """One folder. Every method raises `StorageError`, which names the place, when the place cannot do it.

    Args:
        place: an absolute path, or an fsspec URI.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        scheme, separator, rest = place.partition("://")
        # Whether it lies on a disk of this machine, or on one that is mounted.
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
        # fsspec imports asyncio, which takes as long as a list of hundreds of runs.
        from fsspec.implementations.local import LocalFileSystem

        return LocalFileSystem()

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.place.rstrip("/").rpartition("/")[2]

    def path(self, name: str) -> str:
        """Where a file of the folder lies, for people and for other programs."""
        return join(self.place, name)

    def child(self, name: str) -> Folder:
        """Return a folder inside this one, without resolving the file system again."""
        child = copy.copy(self)
        child.place, child._root = self.path(name), join(self._root, name)
        return child

    def map(self, do: Callable[[T], U], items: Iterable[T]) -> list[U]:
        """Does what reads the folder for each item; many at a time where answers take their time."""
        if self.is_local:
            return list(map(do, items))
        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            return list(pool.map(do, items))

    def prepare(self) -> None:
        """Makes the folder, and finds out whether it can be written: writes, reads and removes a small file."""
        probe, text = f".probe-{uuid.uuid4().hex[:8]}", "headway"
        try:
            self._fs.makedirs(self._root, exist_ok=True)
            self._fs.pipe_file(join(self._root, probe), text.encode())
            if self._fs.cat_file(join(self._root, probe)).decode() != text:
                raise OSError("what was read back is not what was written")
            self._fs.rm_file(join(self._root, probe))
        except Exception as error:  # every file system has errors of its own
            raise StorageError(f"{self.place} cannot be written: {type(error).__name__}: {error}") from error

    def check_writable(self) -> None:
        """Finds out whether the folder could be made and written, as far as that goes without writing."""
        if not self.is_local:
            return
        there = next(each for each in (Path(self._root), *Path(self._root).parents) if each.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise StorageError(f"{self.place} cannot be written: {there} is no folder that this user can write to")

    def read(self, name: str) -> str | None:
        """Returns the text of a file; None if there is none."""
        try:
            if self.is_local:
                with open(join(self._root, name), "rb") as file:
                    return file.read().decode()
            return str(self._fs.cat_file(join(self._root, name)).decode())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:
            raise StorageError(f"{self.path(name)} cannot be read: {error}") from error

    def write(self, name: str, text: str) -> None:
        """Replaces a file as a whole: a reader sees the old text or the new one."""
        try:
            if not self.is_local:
                # An object store shows an object when all of it is there.
                self._fs.pipe_file(join(self._root, name), text.encode())
                return
            part = Path(self._root, f".{name}.{os.getpid()}.part")
            part.write_text(text)
            part.replace(Path(self._root, name))
        except Exception as error:
            raise StorageError(f"{self.path(name)} cannot be written: {error}") from error

    def append(self, name: str, line: str) -> None:
        """Adds one line to a file on a disk, in one system call, so that several writers may."""
        assert self.is_local, "object stores cannot append"
        try:
            handle = os.open(Path(self._root, name), os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                size = os.fstat(handle).st_size
                # Half a line that a crash has left would take this one with it.
                is_torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
                data = f"{chr(10) * is_torn}{line}\n".encode()
                if os.write(handle, data) < len(data):
                    raise OSError("there is no room for all of a line")
            finally:
                os.close(handle)
        except OSError as error:
            raise StorageError(f"{self.path(name)} cannot be written: {error}") from error

    def read_from(self, name: str, offset: int) -> tuple[bytes, int]:
        """Returns what a file has from a byte on, and its size; nothing and 0 if there is none."""
        try:
            size = int(self._fs.size(join(self._root, name)) or 0)
            if size <= offset:
                return b"", size
            return bytes(self._fs.cat_file(join(self._root, name), start=offset, end=size)), size
        except FileNotFoundError:
            return b"", 0
        except Exception as error:
            raise StorageError(f"{self.path(name)} cannot be read: {error}") from error

    def remove(self, name: str) -> None:
        """Removes a file if it is there."""
        try:
            self._fs.rm_file(join(self._root, name))
        except FileNotFoundError:
            pass
        except Exception as error:
            raise StorageError(f"{self.path(name)} cannot be removed: {error}") from error

    def remove_folder(self, name: str) -> None:
        """Removes a folder with all that is in it, if it is there."""
        try:
            self._fs.invalidate_cache(self._root)
            self._fs.rm(join(self._root, name), recursive=True)
        except FileNotFoundError:
            pass
        except Exception as error:
            raise StorageError(f"{self.path(name)} cannot be removed: {error}") from error

    def exists(self, name: str) -> bool:
        """Whether there is such a file or folder."""
        try:
            return (
                os.path.exists(join(self._root, name))
                if self.is_local
                else bool(self._fs.exists(join(self._root, name)))
            )
        except Exception as error:
            raise StorageError(f"{self.path(name)} cannot be read: {error}") from error

    def folders(self) -> list[str]:
        """Names of the folders in it, sorted; none if it does not exist."""
        return sorted(_name(entry) for entry in self._entries() if entry["type"] == "directory")

    def files(self, prefix: str) -> list[str]:
        """Names of the files in it that begin so, sorted."""
        return sorted(name for name in map(_name, self._entries()) if name.startswith(prefix))

    def _entries(self) -> list[dict[str, Any]]:
        try:
            if self.is_local:
                with os.scandir(self._root) as found:
                    return [{"name": each.name, "type": "directory" if each.is_dir() else "file"} for each in found]
            self._fs.invalidate_cache(self._root)
            entries: list[dict[str, Any]] = self._fs.ls(self._root, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except Exception as error:
            raise StorageError(f"{self.place} cannot be listed: {error}") from error
        return entries


def _name(entry: dict[str, Any]) -> str:
    return str(entry["name"]).rstrip("/").rsplit("/", 1)[-1]
