"""Write records, images, texts and histograms for TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .base import RunInfo, Tracker

if TYPE_CHECKING:
    import torch

    from ..metrics.histogram import Histogram


class TensorBoardTracker(Tracker):
    """Writes event files, by default to `tensorboard` in the run directory. A resumed run continues the same curves.

    TensorBoard hides what was written after the step from which a later attempt resumed, or to which a run rolled back.

    Args:
        path: folder of the event files, or a URI that TensorBoard can write to; nothing is written if there is neither
            a path nor a run directory.

    Example:
        >>> Digits(config, run_dir="runs/curves", trackers=[TensorBoardTracker()]).fit().status
        'completed'
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._path = None if path is None else os.fspath(path)
        self._writer: Any = None

    def start(self, run: RunInfo, *, step: int) -> None:
        """Open a new event file, which purges the steps after `step` from the earlier ones."""
        from torch.utils.tensorboard import SummaryWriter

        path = self._path or (run.run_dir and f"{run.run_dir.rstrip('/')}/tensorboard")
        if path:
            self._writer = SummaryWriter(path, purge_step=step + 1 if run.resumed else 0)

    def log(self, metrics: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Write a record, with the epoch as another scalar."""
        if self._writer is not None:
            for name, value in {**metrics, "epoch": epoch}.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def log_images(self, images: Mapping[str, torch.Tensor], *, step: int) -> None:
        """Write images."""
        if self._writer is not None:
            for name, image_CHW in images.items():
                self._writer.add_image(name, image_CHW, step)
            self._writer.flush()

    def log_text(self, texts: Mapping[str, str], *, step: int) -> None:
        """Write texts verbatim, not as Markdown."""
        if self._writer is not None:
            for name, text in texts.items():
                self._writer.add_text(name, "".join(f"    {line}\n" for line in text.splitlines()), step)
            self._writer.flush()

    def log_histograms(self, histograms: Mapping[str, Histogram], *, step: int) -> None:
        """Write histograms."""
        if self._writer is not None:
            for name, each in histograms.items():
                self._writer.add_histogram_raw(
                    name,
                    min=each.edges[0],
                    max=each.edges[-1],
                    num=sum(each.counts),
                    sum=each.total,
                    sum_squares=each.total_of_squares,
                    bucket_limits=each.edges[1:],
                    bucket_counts=each.counts,
                    global_step=step,
                )
            self._writer.flush()

    def rewind(self, step: int) -> None:
        """Purge the steps after `step` with a session-start event, as at the start of an attempt."""
        if self._writer is not None:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog

            self._writer.file_writer.add_event(Event(session_log=SessionLog(status=SessionLog.START)), step + 1)
            self._writer.flush()

    def finish(self, status: str) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
