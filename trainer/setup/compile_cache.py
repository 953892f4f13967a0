"""Compiled code that is kept in the run's folder, so that a restarted rank need not compile again.

The file holds `torch.compiler.save_cache_artifacts` and, because those leave them out, the libraries that Inductor has
built with the C++ compiler. Both are code: loading the file runs it.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import platform
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash

from ..checkpoints.storage import open_storage
from ..distributed.world import World
from ..private_torch import inductor_folder
from ..worker_thread import WorkerThread

FOLDER = "compile-cache"

UPDATES_BEFORE_SAVE = 3
"""Later updates than this rarely compile: shapes that vary are compiled again in the second."""

MAX_BYTES = 1 << 30
"""More is not kept: ranks read the file before they train."""

_TIMEOUT_S = 10.0
_STARTED_S = time.time()


class CompileCache:
    """Loads compiled code from the folder of a run, and saves it there once, in the background. No collectives.

    Compiled code names its device, so there is a file per device, which the ranks of the first machine write.

    Args:
        run_dir: path or URI of the run's directory; no other folder is ever read.
        world: the ranks.
        report: prints a message.
    """

    def __init__(self, run_dir: str, world: World, report: Callable[[str], None]) -> None:
        self._storage, self._report = open_storage(run_dir), report
        index = world.device.index or 0
        self._file = f"{world.device.type}-{index}.bin"
        self._path = f"{self._storage.path_of(FOLDER)}/{self._file}"
        self._writes = world.is_main or world.rank == world.local_rank == index
        self._thread = WorkerThread("headway-compile-cache")
        self._saving: concurrent.futures.Future[None] | None = None

    def load(self) -> int:
        """Load what an earlier attempt has compiled, before anything is compiled; return the bytes, 0 without any.

        A damaged file, or one of another version of torch, is ignored with a message.
        """
        try:
            if not self._storage.has(FOLDER, self._file):
                return 0
            self._check_owner()
            content = self._storage.read(FOLDER, self._file)
            artifacts, libraries = _decode(content)
            with_libraries = inductor_folder()
            for name, library in libraries.items():
                _write_unless_there(with_libraries / name, library)
            if torch.compiler.load_cache_artifacts(artifacts) is None:
                raise ValueError("torch cannot read it")
        except Exception as error:
            self._report(f"ignored the compiled code in {self._path}, and compile again: {error}")
            return 0
        return len(content)

    def save(self) -> None:
        """Start to save what this process has compiled, if this rank is to; does not wait."""
        if self._writes and self._saving is None:
            self._saving = self._thread.submit(self._save, concurrent.futures.Future())

    def clean_up(self) -> None:
        """Wait a limited time for a save, which would end with the process."""
        if self._saving is not None:
            concurrent.futures.wait([self._saving], _TIMEOUT_S)

    def _save(self) -> None:
        try:
            saved = torch.compiler.save_cache_artifacts()
            if saved is None:
                return
            content = _encode(saved[0], dict(_own_libraries(inductor_folder())))
            if len(content) > MAX_BYTES:
                size, limit = len(content) / 1e6, MAX_BYTES / 1e6
                self._report(f"the compiled code is not kept: it has {size:.0f} MB, more than {limit:.0f} MB")
                return
            self._write(content)
        except Exception as error:
            # Training continues without the cache.
            self._report(f"could not save the compiled code to {self._path}: {type(error).__name__}: {error}")

    def _write(self, content: bytes) -> None:
        if "://" in self._path:
            # The checksum detects a torn upload.
            self._storage.write(FOLDER, self._file, content)
            return
        path = Path(self._path)
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        _replace(path, content)

    def _check_owner(self) -> None:
        """Check that no other user can have written the file; an object store has no owners to ask for."""
        if "://" in self._path:
            return
        for path in (Path(self._path), Path(self._path).parent):
            status = path.stat()
            if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o002:
                raise PermissionError(f"another user can write to {path}, and loading it runs code")


def _encode(artifacts: bytes, libraries: dict[str, bytes]) -> bytes:
    payload = b"".join((artifacts, *libraries.values()))
    header = {
        "version": _version(),
        "checksum": xxhash.xxh3_128_hexdigest(payload),
        "artifacts": len(artifacts),
        "libraries": {name: len(library) for name, library in libraries.items()},
    }
    return json.dumps(header).encode() + b"\n" + payload


def _decode(content: bytes) -> tuple[bytes, dict[str, bytes]]:
    """Return the artifacts of torch and the libraries.

    Raises:
        ValueError: the content is damaged, or of another version.
    """
    head, _, payload = content.partition(b"\n")
    try:
        header: dict[str, Any] = json.loads(head)
        is_whole = xxhash.xxh3_128_hexdigest(payload) == header["checksum"]
    except (ValueError, KeyError, TypeError):
        is_whole = False
    if not is_whole:
        raise ValueError("it is damaged")
    if header["version"] != _version():
        raise ValueError(f"it was compiled with {header['version']}, and this is {_version()}")
    artifacts, rest = payload[: header["artifacts"]], payload[header["artifacts"] :]
    libraries = {}
    for name, size in header["libraries"].items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"it names {name}, outside of the folder for compiled code")
        libraries[name], rest = rest[:size], rest[size:]
    return artifacts, libraries


def _version() -> str:
    return f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}"


def _own_libraries(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the libraries that this process has loaded or built, by their path in the folder.

    The folder may be that of all programs of a user, with libraries of years.
    """
    try:
        loaded = {line.rsplit(" ", 1)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    except OSError:
        loaded = set()
    for path in sorted(folder.rglob("*.so")):
        # Modification times may be coarser than the clock.
        if str(path) in loaded or path.stat().st_mtime >= _STARTED_S - 1:
            yield str(path.relative_to(folder)), path.read_bytes()


def _write_unless_there(path: Path, content: bytes) -> None:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, content)
        path.chmod(0o755)


def _replace(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
