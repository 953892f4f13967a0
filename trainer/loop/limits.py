"""The limits in the config at which a run or an epoch ends; equal on every rank."""

from __future__ import annotations

from ..config import TrainerConfig
from .progress import Progress


def reached_limit(config: TrainerConfig, progress: Progress) -> str | None:
    """Return which limit of the run is reached, such as "max_steps=100 reached"; None if none is."""
    limits = (
        ("max_steps", config.max_steps, progress.step),
        ("max_samples", config.max_samples, progress.samples),
        ("max_tokens", config.max_tokens, progress.tokens),
        ("max_epochs", config.max_epochs, progress.epoch),
    )
    for name, limit, now in limits:
        if limit is not None and now >= limit:
            return f"{name}={limit} reached"
    return None


def reached_limit_in_epoch(config: TrainerConfig, progress: Progress) -> bool:
    """Return whether a limit is reached that may end a run inside an epoch."""
    return (
        (config.max_steps is not None and progress.step >= config.max_steps)
        or (config.max_samples is not None and progress.samples >= config.max_samples)
        or (config.max_tokens is not None and progress.tokens >= config.max_tokens)
    )


def reached_steps_per_epoch(config: TrainerConfig, progress: Progress) -> bool:
    """Return whether `steps_per_epoch` ends the epoch here."""
    return config.steps_per_epoch is not None and progress.step_in_epoch >= config.steps_per_epoch
