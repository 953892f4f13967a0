"""Files of text lines, local or in an object store; a kill leaves at most the last line incomplete."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import IO


def open_line_file(path: str) -> LocalLineFile | RemoteLineFile:
    """Return the line file at a path or an fsspec URI."""
    path = path.removeprefix("file://")
    return RemoteLineFile(path) if "://" in path else LocalLineFile(path)


class LocalLineFile:
    """A local file of lines; the last line can be overwritten by a longer one."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._handle: IO[bytes] | None = None
        self._last_at = 0

    def read(self) -> list[str]:
        """Return all complete lines; none if there is no file."""
        return _whole_lines(self._path.read_bytes()) if self._path.exists() else []

    def replace(self, lines: list[str]) -> None:
        """Replace all lines atomically, and open the file to append."""
        self.close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_name(f".{self._path.name}.{uuid.uuid4().hex[:8]}.partial")
        encoded = [f"{line}\n".encode() for line in lines]
        with partial.open("wb") as file:
            file.write(b"".join(encoded))
            file.flush()
            # Without it a power cut after the rename may leave an empty file in place of the whole history.
            os.fsync(file.fileno())
        partial.replace(self._path)
        # Unbuffered, with one write per record: the process may be killed between any two.
        self._handle = self._path.open("r+b", buffering=0)
        self._last_at = self._handle.seek(0, os.SEEK_END) - len(encoded[-1] if encoded else b"")

    def append(self, line: str) -> None:
        """Add a line."""
        assert self._handle is not None
        self._last_at = self._handle.seek(0, os.SEEK_END)
        self._handle.write(f"{line}\n".encode())

    def replace_last(self, line: str) -> None:
        """Write over the last line."""
        assert self._handle is not None
        self._handle.seek(self._last_at)
        self._handle.write(f"{line}\n".encode())
        self._handle.truncate()

    def close(self) -> None:
        """Close the file."""
        if self._handle is not None:
            self._handle.close()
            self._handle = None


class RemoteLineFile:
    """A file of lines in an object store; every change rewrites it as a whole."""

    def __init__(self, uri: str) -> None:
        from fsspec.core import url_to_fs

        self._fs, self._path = url_to_fs(uri)
        self._lines: list[str] = []

    def read(self) -> list[str]:
        """Return all complete lines; none if there is no object."""
        try:
            return _whole_lines(self._fs.cat_file(self._path))
        except FileNotFoundError:
            return []

    def replace(self, lines: list[str]) -> None:
        """Replace all lines."""
        self._lines = list(lines)
        self._fs.makedirs(self._fs._parent(self._path), exist_ok=True)
        self._write()

    def append(self, line: str) -> None:
        """Add a line."""
        self._lines.append(line)
        self._write()

    def replace_last(self, line: str) -> None:
        """Write over the last line."""
        self._lines[-1] = line
        self._write()

    def close(self) -> None:
        """Do nothing: objects are not kept open."""

    def _write(self) -> None:
        self._fs.pipe_file(self._path, "".join(f"{line}\n" for line in self._lines).encode())


def _whole_lines(content: bytes) -> list[str]:
    """Return the lines, without a last one that lacks its newline because a kill cut it short."""
    return content.decode(errors="replace").split("\n")[:-1]
