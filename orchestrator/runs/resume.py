"""What a start of a run begins with: which checkpoint, and what of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from headway.trainer.checkpoints.store import read_checkpoint
from headway.trainer.errors import CheckpointError, ConfigError
from headway.trainer.loop.run_state import COMPONENTS, check_components

from ..storage.events import Event
from ..storage.folder import absolute


@dataclass(frozen=True, kw_only=True)
class ResumeOptions:
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
    def asked(cls, resume: str, restore: Collection[str], *, accept_changes: bool) -> ResumeOptions:
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

    @property
    def choice(self) -> dict[str, Any]:
        """What the event of a start says of it: nothing where it is the usual, to go on with all of it."""
        chosen: dict[str, Any] = {} if self.resume == "auto" else {"resume": self.resume}
        return chosen if set(self.restore) == set(COMPONENTS) else {**chosen, "restore": sorted(self.restore)}

    def repeated(self, events: Iterable[Event]) -> ResumeOptions:
        """What it comes to in a run that was begun so before: all of what that has saved since.

        So the same command goes on after Ctrl-C, and after a driver was lost. "never" is a wish of its own each time.

        Args:
            events: of the run, the earliest first.
        """
        chosen: dict[str, Any] = {}
        has_saved = False
        for event in events:
            if event["event"] == "checkpoint_saved":
                has_saved = True
            elif event["event"] == "driver_started":
                choice: dict[str, Any] = {name: event[name] for name in ("resume", "restore") if name in event}
                if choice and choice != chosen:
                    chosen, has_saved = choice, False
        if not chosen or chosen != self.choice or self.resume == "never" or not has_saved:
            return self
        return self.after_a_save()

    def after_a_save(self) -> ResumeOptions:
        """What a later attempt of the same start begins with: all of what the start has saved itself."""
        return ResumeOptions(accept_changes=self.accept_changes)
