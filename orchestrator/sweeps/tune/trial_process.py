"""The function that Ray Tune calls in a trial process. Imports almost nothing until it is called."""

from __future__ import annotations

import functools
import pickle
from typing import Any

from ...imports import fast_imports


def train_trial(config: dict[str, Any], packed: bytes, trains_here: bool) -> None:
    """Train one trial. A process trains several, one after another.

    Args:
        config: values of the trial.
        packed: the pickled `SweepTask`; unpickling it imports torch and most of Headway.
        trains_here: whether most trials train in this process, which then imports what they need.
    """
    _import_all(trains_here)
    from .trial import run_trial

    run_trial(config, pickle.loads(packed))


@functools.cache
def _import_all(trains_here: bool) -> None:
    """Import torch and Headway, once per process: garbage of an earlier trial must not be frozen."""
    with fast_imports():
        from . import trial  # noqa: F401

        if trains_here:
            # Otherwise the first optimizer would import it.
            import torch._dynamo  # noqa: F401
