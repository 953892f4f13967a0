"""Records and images for Weights & Biases."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .base import RunInfo, Tracker
from .lines import LocalLines, RemoteLines, open_lines

if TYPE_CHECKING:
    import torch


class WandbTracker(Tracker):
    """Records a run with wandb, as one run of theirs over all restarts, online or offline.

    The id of the run lies in `wandb.json` in the run directory, and in the checkpoints. Steps that were sent before a
    resume or a rewind are not sent again: wandb can append, but take nothing back.

    Args:
        project, mode: as `wandb.init` has them; by default, what the environment says (`WANDB_PROJECT`, `WANDB_MODE`).
        options: further arguments for `wandb.init`, such as `entity`, `group` or `tags`.
    """

    def __init__(self, project: str | None = None, *, mode: str | None = None, **options: Any) -> None:
        self._options = {"project": project, "mode": mode, **options}
        self._id: str | None = None
        self._sent = self._sent_before = -1
        self._memory: LocalLines | RemoteLines | None = None
        self._run: Any = None

    def start(self, run: RunInfo, *, step: int) -> None:
        """Joins the run of the earlier attempts, or begins one."""
        import wandb

        folder = run.run_dir and run.run_dir.rstrip("/")
        local = folder if folder and "://" not in folder else None
        self._memory = open_lines(f"{folder}/wandb.json") if folder else None
        if not run.resumed and run.attempt == 1:
            self._id, self._sent = None, -1
        elif self._memory and (lines := self._memory.read()):
            self.load_state_dict(json.loads(lines[0]))
        self._sent_before = self._sent
        self._id = self._id or self._options.get("id") or uuid.uuid4().hex[:8]
        self._remember()
        if local:
            Path(local, "wandb").mkdir(parents=True, exist_ok=True)
        defaults = {"name": run.name, "dir": local, "config": dict(run.config), "resume": "allow"}
        self._run = wandb.init(**{**defaults, **self._options, "id": self._id})

    def log(self, metrics: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Sends a record, unless its step was sent before a resume or a rewind."""
        if step > self._sent_before:
            self._send({**metrics, "epoch": epoch}, step)

    def log_images(self, images: Mapping[str, torch.Tensor], *, step: int) -> None:
        """Sends images, unless their step was."""
        import wandb

        if step > self._sent_before:
            self._send({name: wandb.Image(_pixels_HWC(image)) for name, image in images.items()}, step)

    def rewind(self, step: int) -> None:
        """Keeps what was sent; the steps that are made again are not sent again."""
        self._sent_before = self._sent

    def finish(self, status: str) -> None:
        """Ends the run, as failed if it failed."""
        if self._run is not None:
            self._run.finish(exit_code=1 if status == "failed" else 0)
            self._run = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the id of the run, and the last step that was sent."""
        return {"id": self._id, "sent": self._sent}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Takes over the id of the run, and the last step that was sent."""
        self._id, self._sent = state_dict["id"], max(self._sent, state_dict["sent"])

    def _send(self, values: dict[str, Any], step: int) -> None:
        # Remembered first: if a kill comes between, a step is missing, which is better than twice there.
        if step > self._sent:
            self._sent = step
            self._remember()
        self._run.log(values, step=step)

    def _remember(self) -> None:
        if self._memory is not None:
            self._memory.replace([json.dumps(self.state_dict())])
            self._memory.close()


def _pixels_HWC(image_CHW: torch.Tensor) -> Any:
    pixels = image_CHW.detach().cpu()
    if pixels.is_floating_point():
        pixels = (pixels.float().clamp(0, 1) * 255).round()
    return pixels.byte().permute(1, 2, 0).numpy()
