"""Lets one process at a time make a folder, which is not there yet."""

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
    """Makes the folder in which another is made, and holds it alone; waits for who else holds it.

    It ends with its process, however that ends. A file system without locks has none: there, as before, one must see to
    it oneself that a folder is made once at a time.
    """
    while True:
        partial.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # renamed by who was making it
            file = (partial / LOCK).open("wb")
            break
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("waits for another process that writes %s", partial)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            logger.warning("cannot lock %s (%s): let no other process write it now", partial, error.strerror)
        yield
