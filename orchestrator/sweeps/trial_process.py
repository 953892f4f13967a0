"""What Ray Tune calls in a process that it has started for trials. Imports next to nothing until it is called."""

from __future__ import annotations

import functools
import gc
import pickle
from typing import Any


def train_trial(config: dict[str, Any], packed: bytes, trains_here: bool) -> None:
    """Train one trial in a process that trains one after another.

    Args:
        config: the values of the trial.
        packed: its `SweepTask`, pickled: reading it imports torch and most of Headway.
        trains_here: what that says of the same name.
    """
    _import_all(trains_here)
    from .trial import run_trial

    run_trial(config, pickle.loads(packed))


@functools.cache
def _import_all(trains_here: bool) -> None:
    """Imports torch and Headway while Python's collector rests, once in a process.

    What modules are made of lives as long as the process. The collector would look at all of it again and again, which
    takes the better part of a second and finds nothing; nor does it look there later.
    """
    gc.disable()
    try:
        from . import trial  # noqa: F401

        if trains_here:
            # The first optimizer would import it.
            import torch._dynamo  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()
