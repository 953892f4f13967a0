"""Pointers from Ray's checkpoints to Headway's: a Ray `Checkpoint` is a small file that names a checkpoint of a run.

Ray copies and deletes its checkpoints as it likes, and those of a run have their own retention. With a pointer neither
deletes what the other needs, and nothing large is copied.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headway.trainer.checkpoints.store import read_checkpoint
from headway.trainer.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from ray.train import Checkpoint

_FILE = "headway.json"


@dataclass(frozen=True, kw_only=True)
class Pointer:
    """What a Ray checkpoint points to.

    Attributes:
        run_dir: folder of the run.
        checkpoint: path or URI of the checkpoint.
        reported_step: step of the evaluation that was reported to Ray Tune with it; None outside of a trial.
    """

    run_dir: str
    checkpoint: str
    reported_step: int | None = None


def write_pointer(pointer: Pointer, folder: str) -> None:
    """Write a pointer into a folder, for `Checkpoint.from_directory`."""
    Path(folder, _FILE).write_text(json.dumps(asdict(pointer)))


def read_pointer(checkpoint: Checkpoint) -> Pointer:
    """Return what a Ray checkpoint points to.

    Raises:
        ConfigError: it is not a checkpoint of a Headway run.
    """
    with checkpoint.as_directory() as folder:
        file = Path(folder, _FILE)
        if not file.exists():
            raise ConfigError(f"{checkpoint.path} is not a checkpoint of a Headway run: it has no {_FILE}")
        return Pointer(**json.loads(file.read_text()))


def checkpoint_path(checkpoint: Checkpoint) -> str:
    """Return the path or URI of the Headway checkpoint to which a Ray checkpoint of `train_loop` or `trainable` points.

    `load_weights`, `Trainer.fit(resume=...)` and `fit(resume=...)` take it.

    Args:
        checkpoint: such as `Result.checkpoint`, or one of `Result.best_checkpoints`.

    Raises:
        ConfigError: it is of another program, or the run's retention has deleted what it points to.
    """
    pointer = read_pointer(checkpoint)
    try:
        read_checkpoint(pointer.checkpoint)
    except CheckpointError as error:
        raise ConfigError(
            f"{checkpoint.path} points to a checkpoint that is gone or damaged ({error}): `config.checkpoint` decides "
            "which ones a run keeps (keep_last, keep_best, keep_every)"
        ) from error
    return pointer.checkpoint
