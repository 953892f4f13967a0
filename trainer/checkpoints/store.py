"""CheckpointStore: a dict of `Stateful` parts <-> a committed, verified directory or URI. Knows no models and no loop.

    <root>/step-00000042/manifest.json       written last; without it, this is no checkpoint
                         parts.pkl           the structure of every part, each a pickle of its own
                         .metadata, *.distcp the tensors of all parts (Distributed Checkpoint), written by all ranks
                         tensors.json        a sum of each tensor
                         rank-00000.pt ...   what each rank keeps to itself

All ranks take every decision together: what fails on one rank is a CheckpointError on all of them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias, TypeVar

import torch
from torch.distributed.checkpoint.api import CheckpointException

from ..data.protocols import Stateful
from ..distributed.world import World
from ..errors import CheckpointError
from ..loop.progress import Duration
from .background import BackgroundSave, BackgroundSaver
from .dcp_writer import DcpWriter
from .file_checksums import FileChecksum
from .manifest import MANIFEST, Checkpoint, CheckpointWarning, parse_manifest, write_manifest
from .retention import Mode, Retention, is_kept
from .scan import ScannedCheckpoint, read_checkpoint, scan, split_path, verify_file
from .snapshot import TENSOR_CHECKSUMS, CheckpointReader, Snapshot
from .staging import Staging
from .storage import Storage, open_storage
from .tensor_checksums import TensorChecksum, combine_checksums, digest_of

__all__ = ["Checkpoint", "CheckpointStore", "CheckpointWarning", "read_checkpoint"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Digests:
    """What has been written into a checkpoint, in short.

    Attributes:
        tensors: of the sums of all tensors, whose own are in a file of the checkpoint.
        ranks: of what each rank keeps to itself, by part and key.
    """

    tensors: str
    ranks: list[dict[str, Any]]

    @classmethod
    def of(cls, tensors: Mapping[str, TensorChecksum], ranks: list[dict[str, Any]]) -> Digests:
        """Draws the sums of tensors together."""
        return cls(digest_of({name: str(each) for name, each in tensors.items()}), ranks)


class _ConcurrentWriterError(CheckpointError):
    """Somebody else saves in this place: to try again is no remedy."""


Meta: TypeAlias = Mapping[str, Any] | Callable[[Digests], Mapping[str, Any]]


class CheckpointStore:
    """The checkpoints of one run. Every rank has one, and calls `save`, `newest_good` and `load` when all others do.

    Retention deletes only after a commit, never the checkpoint just committed nor the best one, and never one that this
    store has loaded, nor one that is pinned (pins.py). Saving a step again commits a second checkpoint and then deletes
    the first, so that there always is one.

    A place belongs to one run at a time. A checkpoint that another process has committed since this store looked first
    is found out at the next save, which then fails and says who that was.

    Args:
        root: directory or fsspec URI; made by the first save. All machines of a run must see the same one.
        world: the ranks that save and load together. A checkpoint can be loaded by any number of ranks.
        keep_last: how many of the checkpoints saved last stay; "all" deletes none.
        monitor: the metric by which some are the best, which stay too, however long ago they were saved.
        mode: "min" where lower is better, "max" where higher is.
        keep_best: how many of the best.
        keep_every: steps or epochs; of the others, the first at or after each multiple of it stays for good.
        keep_every_time: seconds; of the others, the first in each such stretch of the clock stays for good.
        retries: how often what could not be written is written again; each time with a warning. Not where somebody else
            saves in the same place.
        retry_after_s: the pause before that.

    Attributes:
        skipped: what `newest_good` found damaged the last time, and what is wrong with it.
        began_after: the number of the last commit that is none of this run, which has begun anew; 0 where it has not.

    Raises:
        ConfigError: what is to be kept is no such number or time.

    Example:
        >>> store = CheckpointStore("runs/digits/checkpoints", world=World.single("cpu"))
        >>> store.newest_good().step
        4
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        world: World,
        keep_last: int | Literal["all"] = 2,
        monitor: str | None = None,
        mode: Mode = "min",
        keep_best: int = 1,
        keep_every: Duration | None = None,
        keep_every_time: Duration | None = None,
        retries: int = 0,
        retry_after_s: float = 10.0,
    ) -> None:
        self.world = world
        self._retries, self._retry_after_s = retries, retry_after_s
        self._retention = Retention(keep_last, monitor, mode, keep_best, keep_every, keep_every_time)
        self.skipped: list[str] = []
        self._storage = open_storage(root)
        self._staging = Staging()
        self._saver = BackgroundSaver()
        self._dcp_writer = DcpWriter()
        # Not around each save: filters are common to all threads. We know when there is no process group.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        self.began_after: int = 0
        self._sequence = 0
        self._known: set[str] | None = None
        self._loaded: set[str] = set()
        self._verified: set[str] = set()

    def save(
        self,
        parts: Mapping[str, Stateful],
        *,
        rank_parts: Mapping[str, Stateful],
        step: int,
        epoch: int,
        metrics: Mapping[str, float],
        meta: Meta,
        changes_only_on_step: Callable[[torch.Tensor], bool] = lambda _: True,
    ) -> Checkpoint:
        """Writes a checkpoint and returns it once it is on the disk. Every rank must call this.

        Args:
            parts: what all ranks share, equal on all of them but for sharded tensors (`DTensor`).
            rank_parts: what every rank keeps to itself.
            step: completed updates.
            epoch: completed passes over the data.
            metrics: floats of any kind.
            meta: JSON, kept in the manifest; or a function that returns it, called on the main rank by the thread that
                saves, with the digests of what has been written.
            changes_only_on_step: whether a tensor changes only when an optimizer steps. Such a tensor is equal on all
                ranks, which share its writing. Of other tensors, as BatchNorm's buffers, the main rank's are saved.

        Raises:
            CheckpointError: on every rank, whichever rank failed. What was saved before is untouched.
        """
        info = _CheckpointInfo(step, epoch, dict(metrics), meta)
        return self._write(info, lambda: self._snapshot(parts, rank_parts, changes_only_on_step))

    def begin_save(
        self,
        parts: Mapping[str, Stateful],
        *,
        rank_parts: Mapping[str, Stateful],
        step: int,
        epoch: int,
        metrics: Mapping[str, float],
        meta: Meta,
        changes_only_on_step: Callable[[torch.Tensor], bool],
    ) -> BackgroundSave:
        """Begins to do what `save` does in the background, and returns at once. Every rank must call this.

        Tensors that change only on a step must keep their value until `BackgroundSave.wait_for_snapshot` has returned;
        all others are copied before this method returns. Call no other method of the store before `result`.
        """
        info, alone = _CheckpointInfo(step, epoch, dict(metrics), meta), self.world.size == 1
        try:
            snapshot = self._snapshot(parts, rank_parts, changes_only_on_step)
            copy = self._staging.begin(snapshot.tensors, changes_only_on_step=changes_only_on_step)
        except Exception as error:
            # The other ranks are told where they can hear it.
            failure = error
            return self._saver.begin(
                _no_op,
                lambda: self._write(info, lambda: _raise(failure)),
                wait_for_snapshot=_no_op,
                waits_at_exit=alone,
            )

        def copied() -> Snapshot:
            copy.check()
            return replace(snapshot, tensors=copy.tensors)

        return self._saver.begin(
            copy.finish, lambda: self._write(info, copied), wait_for_snapshot=copy.wait, waits_at_exit=alone
        )

    def _snapshot(
        self,
        parts: Mapping[str, Stateful],
        rank_parts: Mapping[str, Stateful],
        changes_only_on_step: Callable[[torch.Tensor], bool],
    ) -> Snapshot:
        return Snapshot.of(parts, rank_parts, writes=lambda tensor: self.world.is_main or changes_only_on_step(tensor))

    def _write(self, info: _CheckpointInfo, snapshot_of: Callable[[], Snapshot]) -> Checkpoint:
        """Writes and commits a snapshot, in several tries if need be. Every rank must call this, in one thread."""
        doing = f"save step {info.step} in {self._storage.path_of('')}"
        snapshot = self._on_all_ranks(doing, snapshot_of)
        left = self._retries
        while True:
            try:
                return self._try_to_write(doing, info, snapshot)
            except CheckpointError as error:
                # All ranks are here, or none is.
                if not left or isinstance(error, _ConcurrentWriterError):
                    raise
                what = f"{error}; trying again in {self._retry_after_s:g} s, up to {left} time{'s'[: left > 1]}"
            if self.world.is_main:
                warnings.warn(what, CheckpointWarning, stacklevel=2)
            left -= 1
            time.sleep(self._retry_after_s)

    def _try_to_write(self, doing: str, info: _CheckpointInfo, snapshot: Snapshot) -> Checkpoint:
        sequence, name, token = self._on_main(doing, lambda: self._plan(info.step))
        staged = self._on_all_ranks(doing, lambda: self._storage.stage(f"{name}-{token}"))
        try:
            written, sums = self._on_all_ranks(doing, lambda: self._write_tensors(snapshot, staged))
            tensors = combine_checksums(self.world.all_gather_object(sums))
            rest = self._on_all_ranks(doing, lambda: self._publish(snapshot, staged, name, list(written), tensors))
            gathered = self.world.all_gather_object(written | rest)
            files = {file: each for rank_sums in gathered for file, each in rank_sums.items()}
            ranks = self.world.all_gather_object(snapshot.digests())

            def commit() -> Checkpoint:
                checkpoint = Checkpoint(
                    path=self._storage.path_of(name),
                    step=info.step,
                    epoch=info.epoch,
                    metrics={key: float(value) for key, value in info.metrics.items()},
                    meta=dict(info.meta(Digests.of(tensors, ranks)) if callable(info.meta) else info.meta),
                    world_size=self.world.size,
                    sequence=sequence,
                    time_s=time.time(),
                    writer=f"process {os.getpid()} on {socket.gethostname()}",
                )
                manifest = write_manifest(checkpoint, files)
                known = self._refuse_foreign()
                # Before: where a commit loses its answer, what is there is ours.
                known.add(name)
                self._sequence = sequence
                self._storage.commit(staged, name, manifest, files)
                return checkpoint

            checkpoint = self._on_main(doing, commit)
        except CheckpointError:
            self._storage.abandon(staged, name)
            raise
        if self.world.is_main:
            try:
                self._retain(name, info.step)
            except Exception as error:
                # It is committed, on every rank: that an old one stays is no reason to fail on one of them.
                what = f"{checkpoint.path} is saved, but what it supersedes is not deleted"
                warnings.warn(f"{what} ({type(error).__name__}: {error})", CheckpointWarning, stacklevel=2)
        return checkpoint

    def list(self) -> list[Checkpoint]:
        """Returns the checkpoints in the order of their commits, not verified. Any process may call this."""
        return [entry.checkpoint for entry in scan(self._storage) if entry.checkpoint is not None]

    def best(self) -> Checkpoint | None:
        """Returns the one with the best value of the metric, not verified; None if none has it. Any process may."""
        return self._retention.best(self.of_this_run())

    def of_this_run(self) -> Sequence[Checkpoint]:
        """Returns those of `list` that this run has saved, and not one before it that began anew."""
        return [each for each in self.list() if each.sequence > self.began_after]

    def contains(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint lies here, and not in another store. Any process may call this."""
        return checkpoint.path == self._storage.path_of(split_path(checkpoint.path)[1])

    def newest_good(self, *, up_to: int | None = None) -> Checkpoint | None:
        """Returns the last checkpoint that is whole, or None if there is none at all. Every rank must call this.

        Those that a run that began anew has left behind are none of its own, and nor are damaged ones before its first.

        Args:
            up_to: leaves out what was saved after more updates than this.

        Each damaged one on the way is named in a `CheckpointWarning` on the main rank, and in `skipped` on all.

        Raises:
            CheckpointError: there are checkpoints, and all of them are damaged.
        """
        doing = f"look for checkpoints in {self._storage.path_of('')}"
        most = math.inf if up_to is None else up_to

        def look() -> Sequence[ScannedCheckpoint]:
            entries = self._scan()
            # What is damaged says not whose it was.
            return [] if self._sequence == self.began_after > 0 else entries

        entries = [
            entry
            for entry in self._on_main(doing, look)
            if (each := entry.checkpoint) is None or (each.sequence > self.began_after and each.step <= most)
        ]
        self.skipped = []
        found: Checkpoint | None = None
        for entry in reversed(entries):
            problem = entry.problem or self._verify(self._storage, entry.name, entry.files)
            if entry.checkpoint is not None and problem is None:
                found = entry.checkpoint
                self._verified.add(found.path)
                break
            self.skipped.append(f"{self._storage.path_of(entry.name)}: {problem}")
        if entries and found is None:
            raise CheckpointError(
                "none of the checkpoints can be read:\n  "
                + "\n  ".join(self.skipped)
                + "\nrestore one from a copy, or move them away to begin again"
            )
        if self.world.is_main:
            for passed in self.skipped:
                warnings.warn(f"passed over a damaged checkpoint: {passed}", CheckpointWarning, stacklevel=2)
        return found

    def load(
        self, parts: Mapping[str, Stateful], *, rank_parts: Mapping[str, Stateful], checkpoint: Checkpoint
    ) -> None:
        """Gives the parts their state, in their order, rank parts last. Every rank must call this.

        What the checkpoint has and nobody asks for stays unread, so one part can be loaded alone. A rank part that
        is not in the checkpoint keeps its fresh state, with one warning; so does, without one, a rank beyond the number
        of ranks that saved. Unpickles: load only what you saved.

        Raises:
            CheckpointError: the checkpoint is damaged, lacks a part, or a part does not take its state.
        """
        doing = f"load {checkpoint.path}"
        storage, name = split_path(checkpoint.path)
        _, files = self._on_main(doing, lambda: parse_manifest(checkpoint.path, storage.read(name, MANIFEST)))
        if checkpoint.path not in self._verified and (problem := self._verify(storage, name, files)):
            raise CheckpointError(f"{checkpoint.path} is damaged: {problem}")
        with tempfile.TemporaryDirectory(prefix="headway-load-") as scratch:
            reader = CheckpointReader(storage, name, Path(scratch))
            self._on_all_ranks(doing, lambda: reader.read_structures(parts))
            self._on_all_ranks(doing, lambda: reader.read_tensors(self.world))
            self._on_all_ranks(doing, lambda: reader.load_into(parts))
            # Each rank its own; what ranks had that are gone is dealt to those that remain.
            ranks = range(self.world.rank, checkpoint.world_size, self.world.size)
            absent = self._on_all_ranks(doing, lambda: reader.load_rank_parts(rank_parts, ranks))
        self._loaded.add(checkpoint.path)
        lacking = sorted({part for rank_absent in self.world.all_gather_object(absent) for part in rank_absent})
        if lacking and self.world.is_main:
            what = f"{checkpoint.path} has no {', '.join(lacking)} state for some rank, which keeps its fresh one"
            warnings.warn(what, CheckpointWarning, stacklevel=2)

    def tensor_checksums(self, checkpoint: Checkpoint) -> dict[str, str]:
        """Returns the sums of all tensors of a checkpoint, by name. Every rank must call this."""
        storage, name = split_path(checkpoint.path)
        sums: dict[str, str] = self._on_main(
            f"read {checkpoint.path}", lambda: json.loads(storage.read(name, TENSOR_CHECKSUMS))
        )
        return sums

    def check_writable(self) -> None:
        """Writes next to nothing and deletes it, to find out now whether a save would fail. Every rank must call this.

        Raises:
            CheckpointError: some rank cannot write here.
        """

        def check() -> None:
            self._storage.check()
            if self.world.is_main and self._known is None:
                self._scan()

        self._on_all_ranks(f"write to {self._storage.path_of('')}", check)

    def remove_leftovers(self) -> None:
        """Removes what killed saves have left. Every rank must call this, before the first save; the main rank acts.

        Raises:
            CheckpointError: nobody can tell what lies there.
        """

        def clean() -> None:
            for name in self._storage.leftovers():
                self._remove(name, self._storage.remove_leftover)

        self._on_main(f"look for what killed saves have left in {self._storage.path_of('')}", clean)

    def read(self, path: str) -> Checkpoint:
        """Reads what a checkpoint says of itself, wherever it lies. Every rank must call this.

        Raises:
            CheckpointError: there is no checkpoint at this path or URI.
        """
        return self._on_main(f"read {path}", lambda: read_checkpoint(path))

    def is_empty(self) -> bool:
        """Whether nothing has ever been saved here, damaged or not. Every rank must call this."""
        return not self._on_main(f"look for checkpoints in {self._storage.path_of('')}", self._scan)

    def start_over(self) -> None:
        """Leaves the checkpoints that are there to the run that saved them. Every rank must call this.

        They stay until their steps are saved again: this run deletes no others, and none of them is its best.

        Raises:
            CheckpointError: nobody can tell what lies there.
        """
        self.remove_leftovers()
        entries = self._on_main(f"look for checkpoints in {self._storage.path_of('')}", self._scan)
        self.began_after = max((each.checkpoint.sequence for each in entries if each.checkpoint), default=0)

    def _plan(self, step: int) -> tuple[int, str, str]:
        """Sequence number, name and token of the next save."""
        if self._known is None:
            self._scan()
        self._refuse_foreign()
        taken = set(self._storage.names())
        name, count = _name(step), 1
        while name in taken:
            count += 1
            name = f"{_name(step)}.{count}"
        return self._sequence + 1, name, uuid.uuid4().hex[:8]

    def _scan(self) -> Sequence[ScannedCheckpoint]:
        """All that lies in the storage. What did at the first look is what this store goes on from."""
        entries = scan(self._storage)
        if self._known is None:
            self._known = {entry.name for entry in entries}
            self._sequence = max((entry.checkpoint.sequence for entry in entries if entry.checkpoint), default=0)
        return entries

    def _refuse_foreign(self) -> set[str]:
        """Returns the names of all checkpoints, which this store knows: two runs would delete each other's.

        Raises:
            CheckpointError: there is one that somebody else has saved.
        """
        assert self._known is not None
        there = set(self._storage.names())
        self._known &= there
        for name in sorted(there - self._known):
            if name.startswith("step-") and self._storage.committed(name):
                raise _ConcurrentWriterError(
                    f"{_writer(self._storage, name)} has saved {name} here since this run began or went on: two runs "
                    "write to one place. Stop one of them, or give each a run_dir of its own"
                )
        return self._known

    def _write_tensors(
        self, snapshot: Snapshot, staged: Path
    ) -> tuple[dict[str, FileChecksum], dict[str, TensorChecksum]]:
        """Writes this rank's tensors, and returns its files and sums of what is in them."""
        written = self._dcp_writer.write(snapshot.tensors, staged, self.world)
        # The sums are taken meanwhile.
        self._storage.flush(staged, written.file)
        return {written.file: written.file_sum.result()}, written.tensor_checksums()

    def _publish(
        self, snapshot: Snapshot, staged: Path, name: str, written: Sequence[str], tensors: Mapping[str, TensorChecksum]
    ) -> dict[str, FileChecksum]:
        """Brings this rank's files to where all ranks' files meet, and returns those that were not written before."""
        rest = snapshot.write_other_files(staged, self.world, tensors)
        self._storage.publish(staged, name, [*written, *rest])
        return rest

    def _retain(self, committed: str, step: int) -> None:
        names = [name for name in self._storage.names() if name.split(".")[0] == _name(step) and name != committed]
        doomed = [name for name in names if self._storage.committed(name)]
        there = {
            entry.checkpoint.path: entry
            for entry in scan(self._storage)
            if entry.checkpoint is not None and entry.name not in doomed
        }
        checkpoints = [
            entry.checkpoint
            for entry in there.values()
            if entry.checkpoint is not None and entry.checkpoint.sequence > self.began_after
        ]
        doomed += [there[each.path].name for each in self._retention.superseded(checkpoints)]
        for name in doomed:
            if self._storage.path_of(name) not in self._loaded and not is_kept(self._storage, name):
                self._remove(name, self._storage.remove)
        if doomed:
            # Another run may use the name again.
            assert self._known is not None
            self._known &= set(self._storage.names())

    def _remove(self, name: str, remove: Callable[[str], None]) -> None:
        try:
            remove(name)
        except FileNotFoundError:
            return  # somebody else has deleted it
        except Exception as error:
            what = (
                f"could not delete {self._storage.path_of(name)} ({type(error).__name__}: {error}); delete it by hand"
            )
            warnings.warn(what, CheckpointWarning, stacklevel=4)

    def _verify(self, storage: Storage, name: str, files: Mapping[str, FileChecksum]) -> str | None:
        """What is wrong with a checkpoint, the same on every rank; the ranks share the reading."""
        mine = sorted(files, key=lambda file: -files[file].size_bytes)[self.world.rank :: self.world.size]
        problems = self._on_all_ranks(
            f"verify {storage.path_of(name)}",
            lambda: [problem for file in mine if (problem := verify_file(storage, name, file, files[file]))],
        )
        return "; ".join(problem for each in self.world.all_gather_object(problems) for problem in each) or None

    def _on_main(self, doing: str, do: Callable[[], T]) -> T:
        """Calls a function on the main rank; every rank gets what it returns, or raises if it fails."""
        value = self._on_all_ranks(doing, lambda: do() if self.world.is_main else None)
        return self.world.broadcast(value)  # type: ignore[return-value]

    def _on_all_ranks(self, doing: str, do: Callable[[], T]) -> T:
        """Calls a function on every rank; if it fails on one, all raise.

        Raises:
            CheckpointError: with what each rank that failed has to say.
        """
        box: list[T] = []
        failure: BaseException | None = None
        try:
            box.append(do())
        except (Exception, CheckpointException) as error:
            failure = error
        own = _format_failure(failure, self.world.rank), isinstance(failure, _ConcurrentWriterError)
        gathered = self.world.all_gather_object(own)
        if told := {rank: line for lines, _ in gathered for rank, line in lines.items()}:
            lines = told.values() if self.world.size == 1 else [f"rank {rank}: {line}" for rank, line in told.items()]
            kind = _ConcurrentWriterError if any(is_taken for _, is_taken in gathered) else CheckpointError
            raise kind(f"cannot {doing}: {'; '.join(lines)}") from failure
        return box[0]


@dataclass(frozen=True)
class _CheckpointInfo:
    """What a checkpoint is to say of itself."""

    step: int
    epoch: int
    metrics: dict[str, float]
    meta: Meta


def _writer(storage: Storage, name: str) -> str:
    with contextlib.suppress(CheckpointError, OSError):
        return parse_manifest(name, storage.read(name, MANIFEST))[0].writer or "another process"
    return "another process"


def _no_op() -> None:
    return


def _raise(error: Exception) -> NoReturn:
    raise error


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _format_failure(failure: BaseException | None, rank: int) -> dict[int, str]:
    """One line of what went wrong on each rank that it is known of; our own errors say it themselves."""
    if failure is None:
        return {}
    if isinstance(failure, CheckpointException):
        return {rank: f"{type(cause).__name__}: {cause}" for rank, (cause, _) in failure.failures.items()}
    return {rank: str(failure) if isinstance(failure, CheckpointError) else f"{type(failure).__name__}: {failure}"}
