"""A lock that lets one process at a time create a folder."""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger("headway.datasets")

LOCK = ".lock"


@contextmanager
def locked(partial: Path) -> Iterator[None]:
    """Create the folder `partial` and hold an exclusive lock on it; waits for a process that holds it already.

    The lock is released when its process ends, for any reason. On a file system without locks this only logs a warning.
    """
    while True:
        partial.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # renamed by the process that finished it
            file = (partial / LOCK).open("wb")
            break
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("waiting for another process that is writing %s", partial)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            logger.warning("cannot lock %s (%s): no other process may write it now", partial, error.strerror)
        yield
