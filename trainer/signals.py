"""SIGINT and SIGTERM as requests for an orderly end, where Python lets a program have them: in the main thread."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_on_signals(request_stop: Callable[[str], None]) -> Iterator[None]:
    """Turns the first signal into a request, and lets the second one act as it would have without us.

    Outside the main thread (a Ray Train worker) nothing is installed; the request has to come another way.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}

    def on_signal(number: int, frame: FrameType | None) -> None:
        restore()
        request_stop(signal.Signals(number).name)

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in _SIGNALS:
        before[number] = signal.signal(number, on_signal)
    try:
        yield
    finally:
        restore()
