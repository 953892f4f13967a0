"""The callback of the training workers for checkpoints that another worker evaluates."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from headway.trainer.callbacks.base import Callback
from headway.trainer.trainer import Trainer

from ..errors import StorageError
from ..storage.events import JsonlTail
from ..storage.folder import Folder


class EvaluatedElsewhere(Callback):
    """Adds the metrics of the newest checkpoint that was evaluated in another worker to the next record of training.

    A thread of the main rank looks for them, so training never waits for the storage.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._ended = threading.Event()
        self._newest: Mapping[str, float] | None = None

    def on_setup_end(self, trainer: Trainer[Any]) -> None:
        """Add a metric source, and start looking for metrics."""
        trainer.add_metric_source(lambda record: trainer.world.broadcast(self._take()))
        if trainer.world.is_main:
            self._ended.clear()
            threading.Thread(target=self._poll, name="headway-evaluations", daemon=True).start()

    def on_fit_end(self, trainer: Trainer[Any], error: BaseException | None) -> None:
        """Stop looking."""
        self._ended.set()

    def _take(self) -> dict[str, float]:
        newest, self._newest = self._newest, None
        return dict(newest or {})

    def _poll(self) -> None:
        tail: JsonlTail | None = None
        while not self._ended.wait(0.5 if self._folder.is_local else 3.0):
            try:
                tail = tail or JsonlTail(self._folder, "events", from_now=True)
                found = tail.read()
            except StorageError:
                continue
            for event in found:
                if event["event"] == "evaluated" and "checkpoint" in event:
                    self._newest = {**event["metrics"], "evaluated_step": float(event["step"])}
