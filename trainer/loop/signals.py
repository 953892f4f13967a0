"""SIGINT and SIGTERM as stop requests; only in the main thread, where Python allows signal handlers."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SECOND_SIGINT_S = 1.0


@contextmanager
def stop_on_signals(request_stop: Callable[[str], None]) -> Iterator[None]:
    """Turn SIGINT and SIGTERM into a stop request; a second Ctrl-C acts as without this handler.

    It must come at least one second after the first: `torchrun` forwards the SIGINT that its ranks have already got
    from the terminal, and then sends SIGTERM. Repeated SIGTERM has no effect; use SIGKILL.

    Outside the main thread (a Ray Train worker) no handler is installed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}
    interrupted_s: list[float] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            interrupted_s.append(time.monotonic())
            if interrupted_s[-1] - interrupted_s[0] > _SECOND_SIGINT_S:
                restore()
                signal.raise_signal(number)
                return
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
