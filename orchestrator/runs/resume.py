"""Options of a start: the checkpoint to resume from, and the parts to restore."""

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
    """Arguments of `Trainer.fit` in the workers until this start has saved a checkpoint.

    Attributes:
        resume: "auto", "never", or the path of a checkpoint.
        restore: parts of the checkpoint to restore.
        accept_changes: resume although the config has changed.
    """

    resume: str = "auto"
    restore: tuple[str, ...] = COMPONENTS
    accept_changes: bool = False

    @classmethod
    def checked(cls, resume: str, restore: Collection[str], *, accept_changes: bool) -> ResumeOptions:
        """Check the user's options.

        Raises:
            ConfigError: there is no such checkpoint, or no such part.
        """
        check_components(restore)
        if resume not in ("auto", "never"):
            resume = absolute(resume)
            try:
                read_checkpoint(resume)
            except CheckpointError as error:
                raise ConfigError(f"resume={error}") from error
        return cls(resume=resume, restore=tuple(restore), accept_changes=accept_changes)

    @property
    def explicit(self) -> dict[str, Any]:
        """The options that differ from the default, for the event of a start."""
        chosen: dict[str, Any] = {} if self.resume == "auto" else {"resume": self.resume}
        return chosen if set(self.restore) == set(COMPONENTS) else {**chosen, "restore": sorted(self.restore)}

    def for_restart(self, events: Iterable[Event]) -> ResumeOptions:
        """Return the default options if an earlier start with the same ones has saved a checkpoint, else these options.

        Repeating a command thus resumes the run after Ctrl-C or a lost driver; only "never" applies to every start.

        Args:
            events: events of the run, earliest first.
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
        if not chosen or chosen != self.explicit or self.resume == "never" or not has_saved:
            return self
        return self.after_save()

    def after_save(self) -> ResumeOptions:
        """Return the options after this start has saved a checkpoint: resume from it completely."""
        return ResumeOptions(accept_changes=self.accept_changes)
