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
    handler = _Handler(request_stop)
    for number in _SIGNALS:
        handler.before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        handler.restore()


class _Handler:
    """Handles both signals; `before` has the handlers that it replaces."""

    def __init__(self, request_stop: Callable[[str], None]) -> None:
        self._request_stop = request_stop
        self._interrupted_s: list[float] = []
        self.before: dict[int, Any] = {}

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._interrupted_s.append(time.monotonic())
            if self._interrupted_s[-1] - self._interrupted_s[0] > _SECOND_SIGINT_S:
                self.restore()
                signal.raise_signal(number)
                return
        self._request_stop(signal.Signals(number).name)

    def restore(self) -> None:
        """Put the earlier handlers back."""
        for number, handler in self.before.items():
            signal.signal(number, handler)


def interrupt_main_thread() -> None:
    """Interrupt a system call of the main thread, such as `time.sleep`, so that it raises a pending exception.

    Sends the process a SIGTERM, only while `stop_on_signals` handles it.
    """
    main = threading.main_thread().ident
    if main is not None and isinstance(signal.getsignal(signal.SIGTERM), _Handler):
        signal.pthread_kill(main, signal.SIGTERM)
