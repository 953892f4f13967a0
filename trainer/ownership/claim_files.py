"""The numbered claims on a run's folder, as files in `owner/` there, on a disk or in an object store."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from .process import ProcessId

_FOLDER = "owner"
_SUFFIX = ".json"
# For a store without conditional writes: time in which another writer's object becomes visible.
_SETTLE_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A process's claim on a folder. The claim of the greatest number is in force.

    Attributes:
        number: one more than that of the claim before it.
        token: random, because two processes may write the same number to a store without conditional writes.
        process: the process that made it; None if the file cannot be read.
        beats: grows while the process runs.
        released: whether the process has given the folder up.
    """

    number: int
    token: str
    process: ProcessId | None
    beats: int = 0
    released: bool = False

    @property
    def id(self) -> str:
        """Unique id; `number_of` returns its number."""
        return f"{self.number}-{self.token}"

    @classmethod
    def next_after(cls, newest: Claim | None) -> Claim:
        """Return a new claim of this process."""
        number = 1 if newest is None else newest.number + 1
        return cls(number=number, token=uuid.uuid4().hex[:12], process=ProcessId.this())


def number_of(claim_id: str) -> int:
    """Return the number of a claim by its id; 0 if the id is empty."""
    return int(claim_id.partition("-")[0] or 0)


def normalized(place: str) -> str:
    """Return a folder's path or URI in the form in which two are compared."""
    return place.removeprefix("file://").rstrip("/") or "/"


class ClaimFiles:
    """The claims on one folder. Methods raise the errors of the file system, mostly OSError.

    Args:
        place: path or fsspec URI of the run's folder.
    """

    def __init__(self, place: str) -> None:
        self.place = normalized(place)
        self.is_local = "://" not in self.place
        root = f"{self.place.rstrip('/')}/{_FOLDER}"
        self._files: _Files = _LocalFiles(root) if self.is_local else _RemoteFiles(root)

    def newest(self) -> Claim | None:
        """Return the claim in force, also a released one; None if there never was one."""
        while True:
            numbers = self._numbers()
            if not numbers:
                return None
            # A newer claim may have deleted it since the listing.
            if (found := self.read(max(numbers))) is not None:
                return found

    def read(self, number: int) -> Claim | None:
        """Return a claim by its number; None if there is none."""
        text = self._files.read(_name(number))
        return None if text is None else _parsed(number, text)

    def create(self, claim: Claim) -> bool:
        """Write a new claim, and return whether it is in force: False if another process was first."""
        if not self._files.create(_name(claim.number), _text(claim)):
            return False
        # A process that was suspended between listing and writing may have written a number that was deleted since.
        found = self.newest()
        return found is not None and found.id == claim.id

    def replace(self, claim: Claim) -> None:
        """Write a claim of this process again."""
        self._files.replace(_name(claim.number), _text(claim))

    def remove_before(self, claim: Claim) -> None:
        """Delete the claims that a newer one has superseded; ignore errors."""
        with contextlib.suppress(Exception):
            for number in self._numbers():
                if number < claim.number:
                    self._files.remove(_name(number))

    def _numbers(self) -> list[int]:
        names = (name.removesuffix(_SUFFIX) for name in self._files.names() if name.endswith(_SUFFIX))
        return [int(name) for name in names if name.isdecimal()]


class _Files(Protocol):
    """Small files in one folder."""

    def names(self) -> list[str]: ...

    def read(self, name: str) -> str | None: ...

    def create(self, name: str, text: str) -> bool:
        """Write a file unless it exists; return whether it has been written."""

    def replace(self, name: str, text: str) -> None: ...

    def remove(self, name: str) -> None: ...


class _LocalFiles:
    """In a directory on a local disk or a network file system."""

    def __init__(self, root: str) -> None:
        self._root = Path(root)

    def names(self) -> list[str]:
        try:
            return os.listdir(self._root)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def read(self, name: str) -> str | None:
        try:
            return (self._root / name).read_text()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def create(self, name: str, text: str) -> bool:
        self._root.mkdir(parents=True, exist_ok=True)
        part = self._write_part(name, text)
        try:
            # A link is atomic, also on NFS, and unlike a rename it does not replace.
            os.link(part, self._root / name)
        except FileExistsError:
            # Its own, if NFS has repeated a request whose reply was lost.
            return self.read(name) == text
        except OSError:
            # A file system without links.
            try:
                with open(self._root / name, "x") as file:
                    file.write(text)
            except FileExistsError:
                return False
        finally:
            part.unlink(missing_ok=True)
        return True

    def replace(self, name: str, text: str) -> None:
        self._write_part(name, text).replace(self._root / name)

    def remove(self, name: str) -> None:
        (self._root / name).unlink(missing_ok=True)

    def _write_part(self, name: str, text: str) -> Path:
        part = self._root / f".{name}.{uuid.uuid4().hex[:8]}"
        part.write_text(text)
        return part


class _RemoteFiles:
    """In an object store."""

    def __init__(self, root: str) -> None:
        from fsspec.core import url_to_fs

        fs, path = url_to_fs(root)
        self._fs: Any = fs
        self._root = str(path).rstrip("/")
        write = getattr(type(fs), "_pipe_file", None) or type(fs).pipe_file
        self._creates = "mode" in inspect.signature(write).parameters

    def names(self) -> list[str]:
        self._fs.invalidate_cache()
        try:
            return [str(each).rstrip("/").rsplit("/", 1)[-1] for each in self._fs.ls(self._root, detail=False)]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def read(self, name: str) -> str | None:
        # A file that is not in a cached listing counts as missing.
        self._fs.invalidate_cache(self._root)
        try:
            return str(self._fs.cat_file(f"{self._root}/{name}").decode())
        except FileNotFoundError:
            return None

    def create(self, name: str, text: str) -> bool:
        path = f"{self._root}/{name}"
        if self._creates:
            try:
                # On S3 with "If-None-Match: *". A store that ignores it is caught by the caller's heartbeats.
                self._fs.makedirs(self._root, exist_ok=True)
                self._fs.pipe_file(path, text.encode(), mode="create")
            except Exception:
                if self.read(name) is None:
                    raise
                # Also if the reply to a successful write was lost.
                return self.read(name) == text
            return True
        if self.read(name) is not None:
            return False
        self._fs.makedirs(self._root, exist_ok=True)
        self._fs.pipe_file(path, text.encode())
        time.sleep(_SETTLE_S)
        return self.read(name) == text

    def replace(self, name: str, text: str) -> None:
        self._fs.pipe_file(f"{self._root}/{name}", text.encode())

    def remove(self, name: str) -> None:
        self._fs.rm_file(f"{self._root}/{name}")


def _name(number: int) -> str:
    return f"{number:06d}{_SUFFIX}"


def _text(claim: Claim) -> str:
    return json.dumps(asdict(claim)) + "\n"


def _parsed(number: int, text: str) -> Claim:
    try:
        plain: Mapping[str, Any] = json.loads(text)
        process = ProcessId(**plain["process"])
        return Claim(**{**plain, "number": number, "process": process})
    except (ValueError, TypeError, KeyError):
        # Torn by a power cut, or being written on a file system without links.
        return Claim(number=number, token="", process=None)
