"""Storage of checkpoints in a directory or at an fsspec URI. Handles names and bytes, not their meaning.

A save is staged, published and committed. On a local path it is staged in a hidden directory beside the checkpoints,
and the commit is one rename. An object store cannot rename: every rank stages locally and uploads, and the manifest,
written last, is the commit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import tempfile
import uuid
from pathlib import Path
from typing import Any, Protocol

from ..errors import ConfigError
from .format.file_checksums import FileChecksum, check_regular
from .format.manifest import MANIFEST

_PARTIAL, _DELETED, _REPLACED = ".partial-", ".deleted-", ".replaced-"
_NUM_RANDOM = 8
# Of Linux: see renameat2(2).
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_MOUNTS = Path("/proc/self/mountinfo")
# On other file systems, such as network ones, an I/O error may be temporary.
_LOCAL_FILE_SYSTEMS = "ext2 ext3 ext4 xfs btrfs zfs f2fs jfs bcachefs overlay tmpfs vfat exfat ntfs3"


class Storage(Protocol):
    """One folder of checkpoints.

    Attributes:
        can_replace: whether `commit` may replace a checkpoint of the same name.
    """

    @property
    def can_replace(self) -> bool:
        """Whether `commit` may replace a checkpoint of the same name."""

    def path_of(self, name: str) -> str:
        """Return the path or URI of a checkpoint."""

    def is_disk(self) -> bool:
        """Whether this is known to be a local disk, on which an I/O error means lost data."""

    def names(self) -> list[str]:
        """Return the visible names in the folder."""

    def committed(self, name: str) -> bool:
        """Whether this was ever a complete checkpoint, even if it is damaged now."""

    def read(self, name: str, file: str) -> bytes:
        """Return the content of a small file."""

    def write(self, name: str, file: str, text: bytes) -> None:
        """Write a small file into an existing checkpoint; on a local path, FileNotFoundError if there is none."""

    def unlink(self, name: str, file: str) -> None:
        """Delete one file."""

    def has(self, name: str, file: str) -> bool:
        """Whether a file exists."""

    def size_bytes(self, name: str, file: str) -> int:
        """Return the size of a file; OSError if there is none."""

    def fetch(self, name: str, file: str, into: Path) -> Path:
        """Return a local path to a file; a remote file is copied to `into`."""

    def stage(self, token: str) -> Path:
        """Return the directory to which this rank writes the save `token`. Every rank must call this."""

    def check(self) -> None:
        """Write and delete a file; OSError if that fails."""

    def publish(self, staged: Path, name: str, files: list[str]) -> None:
        """Move this rank's staged files to the folder that all ranks share. Every rank must call this."""

    def commit(self, staged: Path, name: str, manifest: bytes, files: dict[str, FileChecksum]) -> None:
        """Turn a save into a checkpoint, atomically. One rank calls this after all ranks have published.

        If this process is killed while it replaces another one, `remove_leftover` puts that one back.
        """

    def attach(self, staged: Path, name: str, folder: str) -> None:
        """Move a staged directory into a committed checkpoint; FileNotFoundError if there is none any more."""

    def abandon(self, staged: Path, name: str) -> None:
        """Delete the leftovers of a failed save; ignore errors."""

    def remove(self, name: str) -> None:
        """Delete a checkpoint; the remains of an interrupted deletion do not count as a checkpoint."""

    def replaced(self, name: str) -> list[str]:
        """Return the leftovers that were checkpoints of this name, set aside by a save that was killed."""

    def leftovers(self) -> list[str]:
        """Return the names of leftovers of killed saves and deletions."""

    def remove_leftover(self, name: str) -> None:
        """Delete one leftover; or put it back if it was to be replaced, and has not been."""


def open_storage(root: str | os.PathLike[str]) -> Storage:
    """Return the storage at a path or URI, without creating anything."""
    text = os.fspath(root)
    if text.startswith("file://"):
        text = text[len("file://") :]
    return _Remote(text) if "://" in text else _Local(Path(text).absolute())


class _Local:
    """A directory shared by all ranks: on a local disk or a mounted file system."""

    can_replace = True

    def __init__(self, root: Path) -> None:
        self.root = root

    def path_of(self, name: str) -> str:
        return str(self.root / name)

    def is_disk(self) -> bool:
        return _file_system(self.root) in _LOCAL_FILE_SYSTEMS.split()

    def names(self) -> list[str]:
        return (
            [each.name for each in self.root.iterdir() if not each.name.startswith(".")] if self.root.exists() else []
        )

    def committed(self, name: str) -> bool:
        # Only a commit gives a directory a visible name.
        return (self.root / name).is_dir()

    def read(self, name: str, file: str) -> bytes:
        return self._regular(name, file).read_bytes()

    def write(self, name: str, file: str, text: bytes) -> None:
        (self.root / name / file).write_bytes(text)

    def unlink(self, name: str, file: str) -> None:
        (self.root / name / file).unlink()

    def has(self, name: str, file: str) -> bool:
        return (self.root / name / file).exists()

    def size_bytes(self, name: str, file: str) -> int:
        return self._regular(name, file).stat().st_size

    def fetch(self, name: str, file: str, into: Path) -> Path:
        return self._regular(name, file)

    def _regular(self, name: str, file: str) -> Path:
        path = self.root / name / file
        check_regular(path)
        return path

    def stage(self, token: str) -> Path:
        staged = self.root / f"{_PARTIAL}{token}"
        staged.mkdir(parents=True, exist_ok=True)
        return staged

    def check(self) -> None:
        staged = self.stage(f"check-{uuid.uuid4().hex[:8]}")
        (staged / "empty").touch()
        shutil.rmtree(staged)

    def publish(self, staged: Path, name: str, files: list[str]) -> None:
        for file in files:
            _sync(staged / file)

    def commit(self, staged: Path, name: str, manifest: bytes, files: dict[str, FileChecksum]) -> None:
        for file, each in files.items():
            there = (staged / file).stat().st_size if (staged / file).exists() else None
            if there != each.size_bytes:
                raise OSError(
                    f"{staged / file} has {each.size_bytes} bytes where it was written, but {there or 'none'} here: "
                    "all machines of a run must share its storage"
                )
        (staged / MANIFEST).write_bytes(manifest)
        _sync(staged / MANIFEST)
        _sync(staged)
        if _exchange(staged, self.root / name):
            before = staged
        else:
            before = self.root / f"{_REPLACED}{name}{uuid.uuid4().hex[:_NUM_RANDOM]}"
            with contextlib.suppress(FileNotFoundError):
                (self.root / name).rename(before)
            try:
                staged.rename(self.root / name)
            except OSError:
                if before.exists():
                    before.rename(self.root / name)
                raise
        _sync(self.root)
        shutil.rmtree(before, ignore_errors=True)

    def attach(self, staged: Path, name: str, folder: str) -> None:
        # There is one already if the checkpoint has taken the place of another of its step meanwhile.
        shutil.rmtree(self.root / name / folder, ignore_errors=True)
        staged.rename(self.root / name / folder)

    def abandon(self, staged: Path, name: str) -> None:
        shutil.rmtree(staged, ignore_errors=True)

    def remove(self, name: str) -> None:
        doomed = self.root / f"{_DELETED}{name}-{uuid.uuid4().hex[:8]}"
        (self.root / name).rename(doomed)
        shutil.rmtree(doomed)

    def replaced(self, name: str) -> list[str]:
        return [each for each in self.leftovers() if each[:-_NUM_RANDOM] == f"{_REPLACED}{name}"]

    def leftovers(self) -> list[str]:
        if not self.root.exists():
            return []
        return [each.name for each in self.root.iterdir() if each.name.startswith((_PARTIAL, _DELETED, _REPLACED))]

    def remove_leftover(self, name: str) -> None:
        before = self.root / name[len(_REPLACED) : -_NUM_RANDOM]
        if name.startswith(_REPLACED) and (self.root / name).exists() and not before.exists():
            (self.root / name).rename(before)
        else:
            shutil.rmtree(self.root / name)


class _Remote:
    """A folder at any URI that fsspec supports."""

    can_replace = False

    def __init__(self, root: str) -> None:
        # Imported here: a run on a local path does not need fsspec.
        from fsspec.core import url_to_fs

        self.uri = root.rstrip("/")
        try:
            fs, path = url_to_fs(self.uri)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"{self.uri} is not a URI that fsspec can open: {error}") from error
        self.fs: Any = fs
        self.root = str(path).rstrip("/")

    def path_of(self, name: str) -> str:
        return f"{self.uri}/{name}"

    def is_disk(self) -> bool:
        return False

    def names(self) -> list[str]:
        self.fs.invalidate_cache()
        if not self.fs.exists(self.root):
            return []
        return [str(each).rstrip("/").rsplit("/", 1)[-1] for each in self.fs.ls(self.root, detail=False)]

    def committed(self, name: str) -> bool:
        return self.has(name, MANIFEST)

    def read(self, name: str, file: str) -> bytes:
        return bytes(self.fs.cat_file(f"{self.root}/{name}/{file}"))

    def write(self, name: str, file: str, text: bytes) -> None:
        self.fs.pipe_file(f"{self.root}/{name}/{file}", text)

    def unlink(self, name: str, file: str) -> None:
        self.fs.rm_file(f"{self.root}/{name}/{file}")

    def has(self, name: str, file: str) -> bool:
        # Another process may have created the file since the last listing.
        self.fs.invalidate_cache()
        return bool(self.fs.exists(f"{self.root}/{name}/{file}"))

    def size_bytes(self, name: str, file: str) -> int:
        return int(self.fs.info(f"{self.root}/{name}/{file}")["size"])

    def fetch(self, name: str, file: str, into: Path) -> Path:
        copy, partial = into / file, into / f".{file}-{uuid.uuid4().hex[:_NUM_RANDOM]}"
        if not copy.exists():
            try:
                self.fs.get_file(f"{self.root}/{name}/{file}", str(partial))
                # Other ranks may read the copy as soon as it exists.
                partial.rename(copy)
            finally:
                partial.unlink(missing_ok=True)
        return copy

    def stage(self, token: str) -> Path:
        return Path(tempfile.mkdtemp(prefix=f"headway-{token}-"))

    def check(self) -> None:
        # The name is one that `leftovers` finds.
        name = f"{self.root}/step-check-{uuid.uuid4().hex[:8]}"
        self.fs.makedirs(name, exist_ok=True)
        self.fs.pipe_file(f"{name}/empty", b"-")
        self.fs.rm(name, recursive=True)

    def publish(self, staged: Path, name: str, files: list[str]) -> None:
        self.fs.makedirs(f"{self.root}/{name}", exist_ok=True)
        for file in files:
            self._upload(staged / file, f"{self.root}/{name}/{file}")
        shutil.rmtree(staged)

    def _upload(self, file: Path, target: str) -> None:
        try:
            self.fs.put_file(str(file), target)
        except Exception:  # each file system has its own exceptions
            # The client repeats a request whose reply was lost, and S3 may refuse to end an upload in parts twice. What
            # is there may also be a file of a killed save, so the file is sent again.
            self.fs.put_file(str(file), target)

    def commit(self, staged: Path, name: str, manifest: bytes, files: dict[str, FileChecksum]) -> None:
        self.fs.invalidate_cache()
        for file, each in files.items():
            if (there := self.size_bytes(name, file)) != each.size_bytes:
                raise OSError(f"{self.path_of(name)}/{file} arrived with {there} of {each.size_bytes} bytes")
        self.fs.pipe_file(f"{self.root}/{name}/{MANIFEST}", manifest)

    def attach(self, staged: Path, name: str, folder: str) -> None:
        for file in (each for each in staged.rglob("*") if each.is_file()):
            target = f"{self.root}/{name}/{folder}/{file.relative_to(staged).as_posix()}"
            self.fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._upload(file, target)
        if not self.committed(name):
            # Deleted in the meantime, when some of these files had not arrived yet.
            self.fs.rm(f"{self.root}/{name}", recursive=True)
            raise FileNotFoundError(self.path_of(name))

    def abandon(self, staged: Path, name: str) -> None:
        # Uploaded files are left to `leftovers`: without a manifest they do not count, and another rank may write.
        shutil.rmtree(staged, ignore_errors=True)

    def remove(self, name: str) -> None:
        self.fs.rm(f"{self.root}/{name}/{MANIFEST}")
        self.fs.rm(f"{self.root}/{name}", recursive=True)

    def replaced(self, name: str) -> list[str]:
        return []  # nothing is replaced in a bucket

    def leftovers(self) -> list[str]:
        return [name for name in self.names() if name.startswith("step-") and not self.committed(name)]

    def remove_leftover(self, name: str) -> None:
        self.fs.rm(f"{self.root}/{name}", recursive=True)


def _file_system(path: Path) -> str | None:
    """Return the Linux name of the file system type of a path; None if unknown."""
    try:
        mounts = _MOUNTS.read_bytes().splitlines()
    except OSError:
        return None
    kinds: dict[Path, str] = {}
    for mount in mounts:
        place, _, kind = mount.partition(b" - ")
        # Separators inside a field are escaped as "\\040"; a later mount hides an earlier one.
        name = re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), place.split(b" ")[4])
        kinds[Path(os.fsdecode(name))] = os.fsdecode(kind.split(b" ")[0])
    resolved = path.resolve()
    return next((kinds[each] for each in (resolved, *resolved.parents) if each in kinds), None)


def _sync(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two directories at once, if both exist and the system can: Linux can, but not on NFS."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    error: int = renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    return error == 0
