"""SIGINT and SIGTERM at the driver: the first asks for a checkpoint and the end, a second Ctrl-C for the end alone."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any


class StopSignals:
    """Takes SIGINT and SIGTERM, in the main thread; elsewhere signals go where they went before.

    The first one counts, and each Ctrl-C that comes a second after another one: a terminal sends it to the whole group,
    and wrappers forward it once more. A repeated SIGTERM changes nothing: schedulers send several, and who wants more
    has SIGKILL.

    Attributes:
        count: how many counted; more than one means "at once".
        number: of the first one.
        raises: whether those that count raise KeyboardInterrupt besides.
    """

    def __init__(self) -> None:
        self.count = 0
        self._interrupted_s: float | None = None
        self.number: int | None = None
        self.raises = True
        self._before: dict[int, Any] = {}

    @property
    def name(self) -> str:
        """Of the first one, for people."""
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
        """Takes the signals, also from who took them in between."""
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
