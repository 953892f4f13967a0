"""Temporary files for rows that have been read long before they are needed."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from ..arrow import Rows

# A temporary file ends with the rows that reach this size.
_FILE_BYTES = 256 * 2**20


class SpillError(Exception):
    """Rows cannot be kept in a temporary file, such as on a full disk."""


def spill_folder() -> str | None:
    """Return the folder of temporary files: TMPDIR, or else /var/tmp, which is on a disk where /tmp is in memory.

    None if neither can be written.
    """
    folders = [each for each in (os.environ.get("TMPDIR"), "/var/tmp", "/tmp") if each]
    return next((each for each in folders if os.access(each, os.W_OK | os.X_OK)), None)


def has_room(size_bytes: int) -> bool:
    """Return whether the disk of the temporary files has so much room."""
    folder = spill_folder()
    try:
        return folder is not None and shutil.disk_usage(folder).free >= size_bytes
    except OSError:
        return False


class Spill:
    """Writes rows to temporary files without names, which the system removes even if the process is killed."""

    def __init__(self) -> None:
        self._file = _SpillFile()

    def put(self, pieces: Sequence[Rows]) -> list[SpilledRows]:
        """Write some pieces of rows, to be read one by one.

        Raises:
            SpillError: they cannot be written.
        """
        if self._file.size >= _FILE_BYTES:
            self._file = _SpillFile()
        return self._file.append(pieces)


class _SpillFile:
    """A temporary file, which is closed, and so removed, when no piece of it is left."""

    def __init__(self) -> None:
        self.size = 0
        try:
            self._file = tempfile.TemporaryFile(dir=spill_folder(), buffering=0)  # noqa: SIM115 (see `__del__`)
        except OSError as error:
            raise SpillError(str(error)) from error

    def append(self, pieces: Sequence[Rows]) -> list[SpilledRows]:
        data = io.BytesIO()
        ends = [0]
        for each in pieces:
            pickle.dump(each, data, protocol=5)
            ends.append(data.tell())
        left = data.getbuffer()
        try:
            while left:  # a disk that becomes full takes some bytes, and fails at the next
                left = left[os.pwrite(self._file.fileno(), left, self.size + ends[-1] - len(left)) :]
        except OSError as error:
            raise SpillError(str(error)) from error
        spilled = [SpilledRows(self, self.size + start, end - start) for start, end in pairwise(ends)]
        self.size += ends[-1]
        return spilled

    def read(self, offset: int, size: int) -> Rows:
        try:
            rows: Rows = pickle.loads(os.pread(self._file.fileno(), size, offset))
        except (OSError, pickle.UnpicklingError) as error:
            raise SpillError(str(error)) from error
        return rows

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()


class SpilledRows(NamedTuple):
    """Some rows in a temporary file."""

    file: _SpillFile
    offset: int
    size: int

    def read(self) -> Rows:
        """Return all of these rows."""
        return self.file.read(self.offset, self.size)
