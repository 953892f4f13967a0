"""Keep marks on the checkpoints that PBT trials will resume from; otherwise their own run might delete them first."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from headway.trainer.checkpoints.retention import is_kept, mark_kept, unmark_kept
from headway.trainer.checkpoints.scan import scan, split_path
from headway.trainer.errors import CheckpointError

from ..storage.events import Event


class PBTCheckpoints:
    """Keeps the checkpoints that trials will resume from. Keep marks set by a user stay.

    Args:
        changes: "trial_changed" events of earlier starts of the sweep; they tell its keep marks from a user's.
        waiting: by trial, the checkpoint that it has yet to resume from.
    """

    def __init__(self, changes: Iterable[Event], waiting: dict[str, str]) -> None:
        self._ours = {change["checkpoint"] for change in changes if change.get("pinned")}
        self._held = {trial: checkpoint for trial, checkpoint in waiting.items() if checkpoint in self._ours}
        self._tidy()

    def keep(self, trial: str, checkpoint: str) -> tuple[str, bool]:
        """Mark the checkpoint that a trial resumes from, or the newest of the same run if that one is gone.

        Returns:
            The path of the checkpoint, and whether the sweep set the mark.

        Raises:
            CheckpointError: the run has no checkpoint left.
        """
        storage, name = split_path(checkpoint)
        for candidate in [name, *(entry.name for entry in reversed(scan(storage)) if entry.checkpoint is not None)]:
            with suppress(CheckpointError):
                path = storage.path_of(candidate)
                if path not in self._ours and is_kept(storage, candidate):
                    return path, False
                mark_kept(storage, candidate)
                self._ours.add(path)
                self._held[trial] = path
                self._tidy()
                return path, True
        raise CheckpointError(f"{checkpoint} is gone, and its run has no other checkpoint for {trial} to resume from")

    def is_waiting(self, trial: str) -> bool:
        """Return whether a checkpoint is held for a trial."""
        return trial in self._held

    def release(self, trial: str) -> None:
        """Remove the mark from the checkpoint that a trial has resumed from."""
        if self._held.pop(trial, None) is not None:
            self._tidy()

    def _tidy(self) -> None:
        for path in self._ours - set(self._held.values()):
            storage, name = split_path(path)
            with suppress(OSError):
                unmark_kept(storage, name)
            self._ours.discard(path)
