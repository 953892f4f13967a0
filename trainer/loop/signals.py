"""SIGINT and SIGTERM as requests for an orderly end, where Python lets a program have them: in the main thread."""

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
    """Turns signals into a request, and lets a second Ctrl-C act as it would have without us.

    Only one that comes a second later is a second one: `torchrun` passes on the SIGINT that its ranks have got from the
    terminal already, and sends SIGTERM after it. Repeated SIGTERM changes nothing: who wants more has SIGKILL.

    Outside the main thread (a Ray Train worker) nothing is installed; the request has to come another way.
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
