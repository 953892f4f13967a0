"""Send records, images, texts and histograms to Weights & Biases."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .base import RunInfo
from .remote_run import RemoteRunTracker

if TYPE_CHECKING:
    import numpy as np

    from ..metrics.histogram import Histogram

_FROM_ENVIRONMENT = {
    "name": "WANDB_NAME", "group": "WANDB_RUN_GROUP", "dir": "WANDB_DIR", "resume": "WANDB_RESUME",
}  # fmt: skip


class WandbTracker(RemoteRunTracker):
    """Records a run with wandb, as one wandb run over all restarts, online or offline.

    The id of the run is in `wandb.json` in the run directory, and in the checkpoints. Steps that were sent before a
    resume or a rewind are not sent again: wandb can append, but not delete. Arguments take precedence over environment
    variables such as `WANDB_PROJECT`, `WANDB_MODE`, `WANDB_NAME` and `WANDB_RUN_ID`. The trials of a sweep are a group
    of this name.

    Args:
        project, mode: as in `wandb.init`.
        options: further arguments of `wandb.init`, such as `entity`, `group` or `tags`.

    Example:
        >>> Digits(config, run_dir="runs/offline", trackers=[WandbTracker("digits", mode="offline")]).fit().status
        'completed'
    """

    service = "wandb"

    def __init__(self, project: str | None = None, *, mode: str | None = None, **options: Any) -> None:
        super().__init__()
        self._options = {"project": project, "mode": mode, **options}
        self._run: Any = None

    def open_run(self, run: RunInfo, known: str | None) -> str:
        """Resume or create the run with `wandb.init`."""
        import wandb

        local = run.run_dir if run.run_dir and "://" not in run.run_dir else None
        if local:
            Path(local, "wandb").mkdir(parents=True, exist_ok=True)
        defaults = {"name": run.full_name, "group": run.group, "dir": local, "resume": "allow"}
        defaults = {key: value for key, value in defaults.items() if _FROM_ENVIRONMENT[key] not in os.environ}
        given = self._options.get("id") or os.environ.get("WANDB_RUN_ID")
        joined = str(given or known or uuid.uuid4().hex[:8])
        self._run = wandb.init(**{**defaults, "config": dict(run.config), **self._options, "id": joined})
        return joined

    def send_metrics(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Send metrics."""
        self._run.log(dict(metrics), step=step)

    def send_images(self, images: Mapping[str, np.ndarray[Any, Any]], *, step: int) -> None:
        """Send images."""
        import wandb

        self._run.log({name: wandb.Image(pixels) for name, pixels in images.items()}, step=step)

    def send_text(self, texts: Mapping[str, str], *, step: int) -> None:
        """Send texts verbatim."""
        import wandb

        self._run.log({name: wandb.Html(f"<pre>{escape(text)}</pre>") for name, text in texts.items()}, step=step)

    def send_histograms(self, histograms: Mapping[str, Histogram], *, step: int) -> None:
        """Send histograms."""
        import wandb

        made = {
            name: wandb.Histogram(np_histogram=(list(each.counts), list(each.edges)))
            for name, each in histograms.items()
        }
        self._run.log(made, step=step)

    def finish(self, status: str) -> None:
        """End the run; a failed run gets exit code 1."""
        if self._run is not None:
            self._run.finish(exit_code=1 if status == "failed" else 0)
            self._run = None
