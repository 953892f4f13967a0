"""Base of the Weights & Biases and MLflow trackers: one run of the service over all restarts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .base import RunInfo, Tracker
from .images import pixels_HWC
from .line_file import LocalLineFile, RemoteLineFile, open_line_file

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ..metrics.histogram import Histogram


class RemoteRunTracker(Tracker):
    """Sends each step once to a service that can append, but not delete.

    The id of the run and the last step that was sent are in `<service>.json` in the run directory and in the
    checkpoints. Steps that were sent before a resume or a rewind are not sent again. A run that resumes from a
    checkpoint of a run with another name is a new run of the service.
    """

    service: str

    def __init__(self) -> None:
        self._id: str | None = None
        self._name: str | None = None
        self._sent = self._sent_before = -1
        self._memory: LocalLineFile | RemoteLineFile | None = None

    def open_run(self, run: RunInfo, known: str | None) -> str:
        """Resume the service's run with the id `known`, or create one; return the id."""
        raise NotImplementedError

    def send_metrics(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Send metrics."""
        raise NotImplementedError

    def send_images(self, images: Mapping[str, np.ndarray[Any, Any]], *, step: int) -> None:
        """Send images, uint8 of shape [height, width, channels]."""
        raise NotImplementedError

    def send_text(self, texts: Mapping[str, str], *, step: int) -> None:
        """Send texts, if the service accepts them."""

    def send_histograms(self, histograms: Mapping[str, Histogram], *, step: int) -> None:
        """Send histograms, if the service accepts them."""

    def start(self, run: RunInfo, *, step: int) -> None:
        """Resume the run of the earlier attempts, or create one."""
        self._memory = open_line_file(f"{run.run_dir.rstrip('/')}/{self.service}.json") if run.run_dir else None
        if not run.resumed and run.attempt == 1:
            self._id, self._sent = None, -1
        elif self._memory and (lines := self._memory.read()):
            self.load_state_dict(json.loads(lines[0]))
        if self._name not in (None, run.name):
            self._id, self._sent = None, -1
        self._name = run.name
        joined = self.open_run(run, self._id)
        if joined != self._id:
            self._id, self._sent = joined, -1
        self._sent_before = self._sent
        self._remember()

    def log(self, metrics: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Send a record, unless its step was sent before a resume or a rewind."""
        if self._claim_step(step):
            self.send_metrics({**metrics, "epoch": epoch}, step=step)

    def log_images(self, images: Mapping[str, torch.Tensor], *, step: int) -> None:
        """Send images, unless their step was sent before."""
        if self._claim_step(step):
            self.send_images({name: pixels_HWC(image) for name, image in images.items()}, step=step)

    def log_text(self, texts: Mapping[str, str], *, step: int) -> None:
        """Send texts, unless their step was sent before."""
        if self._claim_step(step):
            self.send_text(texts, step=step)

    def log_histograms(self, histograms: Mapping[str, Histogram], *, step: int) -> None:
        """Send histograms, unless their step was sent before."""
        if self._claim_step(step):
            self.send_histograms(histograms, step=step)

    def rewind(self, step: int) -> None:
        """Keep what was sent; repeated steps are not sent again."""
        self._sent_before = self._sent

    def state_dict(self) -> dict[str, Any]:
        """Return the id and the name of the run, and the last step that was sent."""
        return {"id": self._id, "name": self._name, "sent": self._sent}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the id and the name of the run, and the last step that was sent."""
        sent_before = self._sent if state_dict["id"] == self._id else -1
        self._id, self._name = state_dict["id"], state_dict["name"]
        self._sent = max(sent_before, state_dict["sent"])

    def _claim_step(self, step: int) -> bool:
        """Return whether a step is still to be sent, and record it as sent.

        Recorded before sending, so that a kill in between loses a step, which is better than a duplicate.
        """
        if step <= self._sent_before:
            return False
        if step > self._sent:
            self._sent = step
            self._remember()
        return True

    def _remember(self) -> None:
        if self._memory is not None:
            self._memory.replace([json.dumps(self.state_dict())])
            self._memory.close()
