"""Indexes of data files: made once by one process, cached in a folder, and checked against the file before use."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..errors import DataError
from ..locking import locked
from ..paths import INDEX, Found, PathLike

COMPRESSED = {".gz": "gzip", ".tgz": "gzip", ".zst": "zstd"}
"""The codec of a compressed file, by its ending."""

_SAMPLE_BYTES = 4096


class Index(NamedTuple):
    """What is known of a file.

    Attributes:
        arrays: such as the offsets of its fragments.
        facts: plain values that JSON can hold.
    """

    arrays: dict[str, npt.NDArray[Any]]
    facts: dict[str, Any]


def index_folder(found: Found, index: PathLike | None) -> Path:
    """Return the folder for the index of a file: beside the file unless `index` names another one.

    Raises:
        DataError: the file is remote, and `index` is None.
    """
    if index is not None:
        return Path(index).expanduser().absolute()
    if "://" in found.path:
        raise DataError(f"{found.path} is remote, so its index needs a local folder: set index='some/folder'")
    return Path(found.path).parent / INDEX


def sample_digest(found: Found) -> str:
    """Return a digest of a file's size and of 4 KiB from its start, middle and end."""
    try:
        with open_file(found) as file:
            size = file.seek(0, os.SEEK_END)
            digest = hashlib.sha256(str(size).encode())
            for place in (0, size // 2 - _SAMPLE_BYTES // 2, size - _SAMPLE_BYTES):
                file.seek(max(0, place))
                digest.update(file.read(_SAMPLE_BYTES))
    except OSError as error:
        raise DataError(f"cannot read {found.path}: {type(error).__name__}: {error}") from error
    return digest.hexdigest()


def open_file(found: Found) -> Any:
    """Open a local or remote file for reading bytes."""
    return found.fs.open(found.inner, "rb") if "://" in found.path else open(found.path, "rb")


def path_for(found: Found, folder: Path, suffix: str) -> Path:
    """Return the path in `folder` of what is made of a data file as it is now."""
    key = hashlib.sha256(f"{found.path}\0{sample_digest(found)}".encode()).hexdigest()[:16]
    return folder / f"{Path(found.inner).name}.{key}{suffix}"


def cached_file(path: Path, make: Callable[[Path], None]) -> Path:
    """Return the path of a file that `make(path)` writes, unless it is there already.

    Processes that need it at the same time wait for the one that makes it.

    Raises:
        DataError: the folder cannot be written.
    """
    if path.exists():
        return path
    try:
        with locked(path.parent):
            if not path.exists():
                temporary = path.with_name(f"{path.name}.writing")
                try:
                    make(temporary)
                    temporary.replace(path)
                finally:
                    with suppress(FileNotFoundError):
                        temporary.unlink()
    except OSError as error:
        raise DataError(
            f"cannot write the index {path} ({error.strerror or error}): set index to a folder that can be written"
        ) from error
    return path


def codec_of(path: str) -> str | None:
    """Return the codec of a compressed file, by its name; None for others."""
    return next((codec for suffix, codec in COMPRESSED.items() if path.lower().endswith(suffix)), None)


def decompressed(found: Found, path: Path) -> Found:
    """Return a file as it is if its name is not that of a compressed one; otherwise what it holds, stored at `path`.

    Raises:
        DataError: the file is damaged, or `path` cannot be written.
    """
    codec = codec_of(found.path)
    if codec is None:
        return found

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            for piece in _contents_of(found, codec):
                file.write(piece)

    local = str(cached_file(path, write))
    return Found(local, fsspec.filesystem("file"), local)


def _contents_of(found: Found, codec: str) -> Iterator[bytes]:
    """Yield what a compressed file holds, in pieces."""
    seen = 0
    try:
        with open_file(found) as raw, pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), codec) as data:
            while piece := data.read(2**20):
                seen += len(piece)
                yield piece
            if not raw.tell():
                raise OSError("it is empty")
    except (OSError, pa.ArrowException) as error:
        if getattr(error, "errno", None) is not None:  # of the file system
            raise DataError(f"cannot read {found.path}: {type(error).__name__}: {error}") from error
        raise DataError(
            f"{found.path} is not a complete {codec} file: {error}, after {seen} bytes of what it holds. Write or "
            "download it again, or leave it out of path"
        ) from error


def cached_index(path: Path, make: Callable[[], Index]) -> Index:
    """Return the index at `path`, or what `make` returns, which is then stored there.

    Raises:
        DataError: the folder cannot be written.
    """

    def write(temporary: Path) -> None:
        arrays, facts = make()
        with temporary.open("wb") as file:
            everything: dict[str, Any] = {**arrays, "facts": np.array(json.dumps(facts))}
            np.savez(file, **everything)

    with np.load(cached_file(path, write), allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files if name != "facts"}
        return Index(arrays, json.loads(str(file["facts"])))
