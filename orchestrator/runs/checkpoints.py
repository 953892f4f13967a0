"""The checkpoints of a run, by name, step, "newest" or "best", and the retention rules that keep them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from headway.trainer.checkpoints.format.manifest import Checkpoint
from headway.trainer.checkpoints.retention import Retention, is_kept
from headway.trainer.checkpoints.scan import ScannedCheckpoint, scan, verify_file
from headway.trainer.checkpoints.storage import Storage, open_storage
from headway.trainer.config import CheckpointConfig
from headway.trainer.errors import ConfigError

from ..storage.folder import absolute, join
from .run import find_run


@dataclass(frozen=True)
class RunCheckpoints:
    """The checkpoints of one run at the time of the call.

    Attributes:
        storage: storage of the checkpoints.
        entries: the checkpoints in the order of their commits; never empty.
        rules: the run's retention rules.
        restarted_after: number of the last commit before the run was restarted from scratch. The rules do not apply
            to checkpoints up to this one.
    """

    storage: Storage
    entries: list[ScannedCheckpoint]
    rules: Retention
    restarted_after: int

    @classmethod
    def of(cls, run: str, storage: str, **rules: int | None) -> RunCheckpoints:
        """Scan the folder of a run, or the `run_dir` of a plain Trainer, which has no `run.json`.

        Args:
            run: name of the run.
            storage: folder or URI of the runs.
            rules: fields of `CheckpointConfig` that override the run's own, unless None.

        Raises:
            ConfigError: there is no such run, or it has no checkpoints.
        """
        place = join(absolute(storage), run)
        opened = open_storage(join(place, "checkpoints"))
        entries = scan(opened)
        if not entries:
            find_run(run, storage)
            raise ConfigError(f"the run {run} in {place} has no checkpoints")
        newest = next((each.checkpoint for each in reversed(entries) if each.checkpoint), None)
        meta = newest.meta if newest else {}
        return cls(opened, entries, _rules(meta, rules), meta.get("began_after", 0))

    def is_pinned(self, entry: ScannedCheckpoint) -> bool:
        """Return whether a checkpoint is pinned."""
        return is_kept(self.storage, entry.name)

    def reasons(self) -> dict[str, list[str]]:
        """Return the rules that keep each readable checkpoint, by its name."""
        reasons = self.rules.reasons(self._since_restart())
        return {
            entry.name: reasons.get(entry.checkpoint.path, ["before the run was restarted"])
            + ["pinned"] * self.is_pinned(entry)
            for entry in self.entries
            if entry.checkpoint
        }

    def problems(self, entry: ScannedCheckpoint) -> list[str]:
        """Return the problems of a checkpoint. Reads all its files."""
        if entry.problem:
            return [entry.problem]
        checked = (verify_file(self.storage, entry.name, file, expected) for file, expected in entry.files.items())
        if found := [each for each in checked if each]:
            now = next((each for each in scan(self.storage) if each.name == entry.name and not each.problem), None)
            if now is not None and now.files != entry.files:
                return self.problems(now)  # replaced in the meantime by a save of the same step
        return found

    def digest(self, entry: ScannedCheckpoint) -> str:
        """Return a digest of the weights of all models, independent of the number of ranks. Reads the checkpoint.

        Raises:
            CheckpointError: the checkpoint is damaged.
        """
        # Imported here because it imports torch, and checkpoints are listed without it.
        from headway.trainer.checkpoints.export import weights_digest

        return weights_digest(self.storage.path_of(entry.name))

    def newest_good(self) -> ScannedCheckpoint | None:
        """Return the checkpoint from which the run would resume. Reads all its files."""
        return next((each for each in reversed(self.entries) if not self.problems(each)), None)

    def find(self, which: list[str]) -> list[ScannedCheckpoint]:
        """Return checkpoints by name, step, "newest" (the newest good one) or "best".

        Raises:
            ConfigError: there is no such checkpoint.
        """
        return [self._find(each) for each in dict.fromkeys(which)]

    def _since_restart(self) -> list[Checkpoint]:
        """Return the checkpoints since the run was last started from scratch."""
        found = (each.checkpoint for each in self.entries)
        return [each for each in found if each is not None and each.sequence > self.restarted_after]

    def _find(self, which: str) -> ScannedCheckpoint:
        found: ScannedCheckpoint | None
        if which == "newest":
            found = self.newest_good()
        elif which == "best":
            best = self.rules.best(self._since_restart())
            found = next((each for each in self.entries if best is not None and each.checkpoint == best), None)
        else:
            # If a step was saved twice, choose the last one.
            of_step = f"step-{int(which):08d}" if which.isdecimal() else which
            named = [each for each in self.entries if each.name == which]
            named += [each for each in reversed(self.entries) if each.name.partition(".")[0] == of_step]
            found = next(iter(named), None)
        if found is None:
            raise ConfigError(
                f"there is no checkpoint {which!r} in {self.storage.path_of('')}; the newest are "
                f"{', '.join(each.name for each in self.entries[-10:])}"
            )
        return found


def _rules(meta: dict[str, Any], instead: dict[str, int | None]) -> Retention:
    """Return the retention rules recorded in the newest checkpoint, ignoring fields of other versions."""
    # Without recorded rules, only the given ones apply.
    recorded = meta.get("config", {}).get("checkpoint", {"keep_last": "all"})
    known = {each.name: recorded[each.name] for each in fields(CheckpointConfig) if each.name in recorded}
    given = {name: value for name, value in instead.items() if value is not None}
    return CheckpointConfig(**{**known, **given}).retention
