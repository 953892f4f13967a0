"""SIGINT and SIGTERM at the driver: the first one stops the run with a checkpoint, a second Ctrl-C without."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any


class StopSignals:
    """Handles SIGINT and SIGTERM inside a `with` block in the main thread; in other threads it changes nothing.

    The first signal counts, and each further Ctrl-C at least a second after the last: a terminal sends it to the whole
    process group, and wrappers forward it again. A repeated SIGTERM is ignored, because schedulers send several.

    Attributes:
        count: signals that counted; more than one means to stop without a checkpoint.
        number: number of the first signal.
        raises: whether a signal that counts also raises KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.count = 0
        self._interrupted_s: float | None = None
        self.number: int | None = None
        self.raises = True
        self._before: dict[int, Any] = {}

    @property
    def name(self) -> str:
        """Name of the first signal, for messages."""
        return {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}.get(
            signal.Signals(self.number or signal.SIGINT), "a signal"
        )

    def __enter__(self) -> StopSignals:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def install(self) -> None:
        """Install the handlers, also over those that another library has installed since."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                before = signal.signal(number, self._on_signal)
                self._before.setdefault(number, before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now_s, before_s = time.monotonic(), self._interrupted_s
        is_again = number == signal.SIGINT and before_s is not None and now_s - before_s >= 1.0
        if number == signal.SIGINT and (before_s is None or is_again):
            self._interrupted_s = now_s
        if self.count and not is_again:
            return
        self.count += 1
        self.number = self.number or number
        if self.raises:
            raise KeyboardInterrupt
