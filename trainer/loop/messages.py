"""Messages of a run: records of the logger `headway.run`, which also appear on the console."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator

logger = logging.getLogger("headway.run")
# Without a handler, Python would print warnings a second time, on stderr.
logger.addHandler(logging.NullHandler())
if logging.getLogger("headway").level == logging.NOTSET:
    logging.getLogger("headway").setLevel(logging.INFO)


def log(text: str, display: Callable[[str], None], *, level: int = logging.INFO, on_console: bool = True) -> None:
    """Log a message and display it, unless its level is disabled.

    Args:
        text: one or several lines.
        display: shows it.
        level: of the record.
        on_console: whether `display` writes to this process's console. If so, it is not called where a handler that the
            user has added prints there already.
    """
    if logger.isEnabledFor(level):
        logger.log(level, text, stacklevel=3)
        if not (on_console and any(_prints(handler) and level >= handler.level for handler in _handlers())):
            display(text)


def _prints(handler: logging.Handler) -> bool:
    return isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stdout, sys.stderr)


def _handlers() -> Iterator[logging.Handler]:
    current: logging.Logger | None = logger
    while current is not None:
        yield from current.handlers
        current = current.parent if current.propagate else None
