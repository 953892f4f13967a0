"""What a start of a run begins with: which checkpoint, and what of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from headway.trainer.checkpoint import read_checkpoint
from headway.trainer.errors import CheckpointError, ConfigError
from headway.trainer.state import COMPONENTS, check_components

from .storage import absolute


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """What `Trainer.fit` is told in the workers, until this start has saved a checkpoint of its own.

    Attributes:
        resume: "auto", "never", or the path of a checkpoint.
        restore: what to take of it.
        accept_changes: goes on although what is trained has changed.
    """

    resume: str = "auto"
    restore: tuple[str, ...] = COMPONENTS
    accept_changes: bool = False

    @classmethod
    def asked(cls, resume: str, restore: Collection[str], *, accept_changes: bool) -> Resumption:
        """Checks what a person asks for.

        Raises:
            ConfigError: there is no such checkpoint, or no such part of one.
        """
        check_components(restore)
        if resume not in ("auto", "never"):
            resume = absolute(resume)
            try:
                read_checkpoint(resume)
            except CheckpointError as error:
                raise ConfigError(f"there is nothing to resume from: {error}") from error
        return cls(resume=resume, restore=tuple(restore), accept_changes=accept_changes)

    def after_a_save(self) -> Resumption:
        """What a later attempt of the same start begins with: all of what the start has saved itself."""
        return Resumption(accept_changes=self.accept_changes)
