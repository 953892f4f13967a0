"""A run's checkpoints as a person asks for them: by name, by step, "newest" or "best", with what keeps each of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from headway.trainer.checkpoints.manifest import Checkpoint
from headway.trainer.checkpoints.retention import Retention, is_kept
from headway.trainer.checkpoints.scan import ScannedCheckpoint, scan, verify_file
from headway.trainer.checkpoints.storage import Storage, open_storage
from headway.trainer.config import CheckpointConfig
from headway.trainer.errors import ConfigError

from ..storage.folder import absolute, join
from .run import find_run


@dataclass(frozen=True)
class RunCheckpoints:
    """The checkpoints of one run, as they lay there when it was made.

    Attributes:
        entries: in the order of their commits; never empty.
        rules: what the run keeps.
        began_after: the number of the last commit before the run began anew: its rules are not for what was saved then.
    """

    storage: Storage
    entries: list[ScannedCheckpoint]
    rules: Retention
    began_after: int

    @classmethod
    def of(cls, run: str, storage: str, **rules: int | None) -> RunCheckpoints:
        """Looks into the folder of a run. A bare Trainer's `run_dir` will do: there need not be a `run.json`.

        Args:
            run: its name.
            storage: folder or URI that holds the runs.
            rules: fields of `CheckpointConfig`, in place of the run's own where they are not None.

        Raises:
            ConfigError: there is no run, or it has no checkpoints.
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
        """Whether somebody wants to keep it."""
        return is_kept(self.storage, entry.name)

    def reasons(self) -> dict[str, list[str]]:
        """What keeps each checkpoint that can be read, by its name."""
        reasons = self.rules.reasons(self._own())
        return {
            entry.name: reasons.get(entry.checkpoint.path, ["before it began anew"])
            + ["pinned"] * self.is_pinned(entry)
            for entry in self.entries
            if entry.checkpoint
        }

    def problems(self, entry: ScannedCheckpoint) -> list[str]:
        """What is wrong with one; reads all of it."""
        if entry.problem:
            return [entry.problem]
        found = (verify_file(self.storage, entry.name, file, expected) for file, expected in entry.files.items())
        return [each for each in found if each]

    def digest(self, entry: ScannedCheckpoint) -> str:
        """A digest of the weights of all models: equal for equal bits, however many ranks have trained and saved them.

        Raises:
            ConfigError: the checkpoint cannot be read, or has no sums of its tensors.
        """
        # Late, for it imports torch: checkpoints are listed without.
        from headway.trainer.checkpoints.snapshot import TENSOR_CHECKSUMS
        from headway.trainer.checkpoints.tensor_checksums import digest_of

        try:
            sums: dict[str, str] = json.loads(self.storage.read(entry.name, TENSOR_CHECKSUMS))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.storage.path_of(entry.name)} has no sums of its tensors: {error}") from error
        return digest_of({name: each for name, each in sums.items() if name.startswith("models/")})

    def newest_good(self) -> ScannedCheckpoint | None:
        """The one that the run would go on from; reads it."""
        return next((each for each in reversed(self.entries) if not self.problems(each)), None)

    def chosen(self, which: list[str]) -> list[ScannedCheckpoint]:
        """The checkpoints of these names: as they are called, or by step, "newest" (the newest good one), "best".

        Raises:
            ConfigError: there is no such one.
        """
        return [self._chosen(each) for each in dict.fromkeys(which)]

    def _own(self) -> list[Checkpoint]:
        """Those of the run as it began last."""
        found = (each.checkpoint for each in self.entries)
        return [each for each in found if each is not None and each.sequence > self.began_after]

    def _chosen(self, which: str) -> ScannedCheckpoint:
        found: ScannedCheckpoint | None
        if which == "newest":
            found = self.newest_good()
        elif which == "best":
            best = self.rules.best(self._own())
            found = next((each for each in self.entries if best is not None and each.checkpoint == best), None)
        else:
            # A step that was saved twice: the one saved last.
            of_step = f"step-{int(which):08d}" if which.isdecimal() else which
            named = [each for each in self.entries if each.name == which]
            named += [each for each in reversed(self.entries) if each.name.partition(".")[0] == of_step]
            found = next(iter(named), None)
        if found is None:
            raise ConfigError(
                f"there is no checkpoint {which!r} in {self.storage.path_of('')}; there is "
                f"{', '.join(each.name for each in self.entries[-10:])}"
            )
        return found


def _rules(meta: dict[str, Any], instead: dict[str, int | None]) -> Retention:
    """What a run keeps, as its newest checkpoint remembers; settings of other versions are passed over."""
    # A store that no trainer wrote to has no rules but those that are given.
    recorded = meta.get("config", {}).get("checkpoint", {"keep_last": "all"})
    known = {each.name: recorded[each.name] for each in fields(CheckpointConfig) if each.name in recorded}
    given = {name: value for name, value in instead.items() if value is not None}
    return CheckpointConfig(**{**known, **given}).retention
