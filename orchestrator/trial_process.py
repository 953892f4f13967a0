"""What Ray Tune calls in a process that it has started for trials. Imports next to nothing until it is called."""

from __future__ import annotations

import functools
import gc
import pickle
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .trial import SweepTask


def train_trial(config: dict[str, Any], packed: bytes) -> None:
    """Trains one trial in a process that trains one after another.

    Args:
        config: the values of the trial.
        packed: its `SweepTask`, pickled: reading it imports torch and most of Headway.
    """
    task = _unpacked(packed)
    from .trial import run_trial

    run_trial(config, task)


@functools.cache
def _unpacked(packed: bytes) -> SweepTask:
    """Has Python's collector rest while all is imported that any trial needs, once in a process.

    What modules are made of lives as long as the process. The collector would look at all of it again and again, which
    takes the better part of a second and finds nothing; nor does it look there later.
    """
    gc.disable()
    try:
        task: SweepTask = pickle.loads(packed)
        if task.trains_here:
            # The first optimizer would import it.
            import torch._dynamo  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()
    return task
