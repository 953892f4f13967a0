"""`CheckpointStore`: save a dict of `Stateful` parts as a committed, verified directory or URI, and load it.

    <root>/step-00000042/manifest.json           written last; a directory without it is not a checkpoint
                         state.json              the plain values of all shared parts
                         rank-00000.json         the tensors in this rank's file, and its own plain values
                         rank-00000.safetensors  this rank's shards of all tensors, and its own tensors

All ranks decide together: a failure on one rank raises CheckpointError on every rank.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NoReturn, TypeAlias

import torch

from ..data.protocols import Stateful
from ..distributed.world import World
from ..errors import CheckpointError
from ..loop.progress import Duration
from .background import BackgroundSave, BackgroundSaver
from .collective_errors import ConcurrentWriterError, gather_from_all, on_all_ranks, on_main
from .format.file_checksums import FileChecksum
from .format.manifest import MANIFEST, Checkpoint, CheckpointWarning, parse_manifest, write_manifest
from .format.plain_values import Table
from .reader import CheckpointReader, FetchedFiles
from .retention import Mode, Retention, is_kept
from .scan import ScannedCheckpoint, read_checkpoint, scan, split_path, verify_file
from .snapshot import Layout, Snapshot, missing_elements, rank_of
from .staging import Staging
from .storage import Storage, open_storage

__all__ = ["Checkpoint", "CheckpointStore", "CheckpointWarning", "read_checkpoint"]


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is not what was written."""


Meta: TypeAlias = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


class CheckpointStore:
    """The checkpoints of one run. Every rank has a store, and all ranks call `save`, `newest_good` and `load` together.

    Old checkpoints are deleted only after a commit. Never deleted are the one just committed, the best ones, those that
    this store has loaded, and pinned ones. Saving a step again replaces its checkpoint under the same name at
    once; on NFS by two renames, and `remove_leftovers` undoes the first if the process is killed before the second.
    In a bucket, or if it is not the newest one or must stay, the save commits a second one, such as
    "step-00000042.2", and then deletes the first unless it must stay.

    Only one run at a time may save to a directory. If another process commits a checkpoint there, the next save fails
    and names that process.

    Args:
        root: directory or fsspec URI, created by the first save. All machines of a run must see the same one.
        world: the ranks that save and load together. A checkpoint can be loaded by any number of ranks.
        keep_last: number of most recently saved checkpoints to keep; "all" deletes none.
        monitor: the metric that ranks checkpoints; the best ones are kept, however old.
        mode: "min" if lower is better, "max" if higher is.
        keep_best: number of best checkpoints to keep.
        keep_every: steps or epochs; the first checkpoint at or after each multiple is kept permanently.
        keep_every_time: seconds; the first checkpoint in each such interval is kept permanently.
        retries: number of retries of a failed write, each with a warning. A save that fails because another process
            saves to the same directory is not retried.
        retry_after_s: pause before each retry.

    Attributes:
        skipped: damaged checkpoints skipped by the last `newest_good`, each with its problem.
        began_after: sequence number of the last checkpoint of an earlier run in this directory; 0 if there is none.
        ownership_problem: called on the main rank in each save, which fails with the message that it returns, if any.

    Raises:
        ConfigError: one of the `keep_*` values is invalid.

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
        self._layout: Layout | None = None
        self._tables: dict[str, Table] = {}
        self._complete_layout: Layout | None = None
        self.began_after: int = 0
        self.ownership_problem: Callable[[], str | None] = _no_op
        self._sequence = 0
        # Names and digests of the last checkpoint, and of the one before it.
        self._chain: list[tuple[str, str]] = []
        self._known: set[str] | None = None
        self._loaded: set[str] = set()
        self._continued: str | None = None
        self._verified: set[str] = set()
        self._damaged: dict[str, str] = {}
        self._fetched = FetchedFiles()

    def save(
        self,
        parts: Mapping[str, Stateful],
        *,
        rank_parts: Mapping[str, Stateful],
        step: int,
        epoch: int,
        metrics: Mapping[str, float],
        meta: Meta,
        is_replicated: Callable[[torch.Tensor], bool] = lambda _: True,
        name: str | None = None,
    ) -> Checkpoint:
        """Write a checkpoint and return it once it is on disk. Every rank must call this.

        Args:
            parts: state shared by all ranks: equal on every rank, except for sharded tensors (`DTensor`).
            rank_parts: state that belongs to one rank.
            step: completed optimizer updates.
            epoch: completed passes over the data.
            metrics: floats, possibly NaN or infinite.
            meta: JSON for the manifest; or a function that returns it, called on the main rank by the saving thread.
            is_replicated: whether a tensor that is not sharded is equal on all ranks. The writing of such tensors is
                divided among the ranks. Of other tensors, such as BatchNorm's buffers, the main rank's are saved.
            name: a name of the caller's choice, under which the checkpoint belongs to no run: it replaces an earlier
                one of this name once all is staged, and no other is deleted. By default the step is the name.

        Raises:
            CheckpointError: on every rank if one rank failed, or `name` exists and is not a checkpoint. Earlier
                checkpoints are untouched.
        """
        info = _CheckpointInfo(step, epoch, dict(metrics), meta, name)
        return self._write(info, lambda: self._snapshot(parts, rank_parts, is_replicated))

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
        is_replicated: Callable[[torch.Tensor], bool] | None = None,
        sharded: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> BackgroundSave:
        """Start a save in the background and return immediately. Every rank must call this.

        Tensors that change only on a step must keep their value until `BackgroundSave.wait_for_snapshot` has returned;
        all others are copied before this method returns (on a GPU, before work that is enqueued later). Call no other
        method of the store before `result`. By default all tensors that change only on a step are replicated, see
        `save`. `sharded` has the live sharded parameters, as `Staging.begin` takes them.
        """
        info, alone = _CheckpointInfo(step, epoch, dict(metrics), meta), self.world.size == 1
        try:
            snapshot = self._snapshot(parts, rank_parts, is_replicated or changes_only_on_step)
            copy = self._staging.begin(snapshot.tensors, snapshot.layout, changes_only_on_step, sharded)
        except Exception as error:
            # Raised in the save thread, where the other ranks wait for this one in a collective.
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

    def rehearse_save(
        self,
        parts: Mapping[str, Stateful],
        *,
        changes_only_on_step: Callable[[torch.Tensor], bool],
        is_replicated: Callable[[torch.Tensor], bool],
    ) -> None:
        """Copy the state in the background and discard it, so that the first save finds memory for its copies.

        The kernel needs several times as long for new memory as for the copy. Errors are left to the save, which raises
        them on all ranks. No collectives.
        """
        with contextlib.suppress(Exception):
            snapshot = self._snapshot(parts, {}, is_replicated)
            copy = self._staging.begin(snapshot.tensors, snapshot.layout, changes_only_on_step)
            self._saver.rehearse(copy.finish)

    def _snapshot(
        self,
        parts: Mapping[str, Stateful],
        rank_parts: Mapping[str, Stateful],
        is_replicated: Callable[[torch.Tensor], bool],
    ) -> Snapshot:
        snapshot = Snapshot.of(
            parts, rank_parts, world=self.world, is_replicated=is_replicated, last=self._layout, tables=self._tables
        )
        self._layout = snapshot.layout
        return snapshot

    def _write(self, info: _CheckpointInfo, snapshot_of: Callable[[], Snapshot]) -> Checkpoint:
        """Write and commit a snapshot, with retries. Every rank must call this, from one thread."""
        doing = f"save step {info.step} in {self._storage.path_of('')}"
        taken: list[Snapshot] = []

        def take() -> bool:
            taken.append(snapshot_of())
            return taken[0].layout is self._complete_layout

        if not all(gather_from_all(self.world, doing, take)):
            self._check_complete(doing, taken[0])
        left = self._retries
        while True:
            try:
                return self._try_to_write(doing, info, taken[0])
            except CheckpointError as error:
                # The error was raised on all ranks, so all of them retry.
                if not left or isinstance(error, ConcurrentWriterError):
                    raise
                what = f"{error}; trying again in {self._retry_after_s:g} s, up to {left} time{'s'[: left > 1]}"
            if self.world.is_main:
                warnings.warn(what, CheckpointWarning, stacklevel=2)
            left -= 1
            time.sleep(self._retry_after_s)

    def _try_to_write(self, doing: str, info: _CheckpointInfo, snapshot: Snapshot) -> Checkpoint:
        sequence, name, token = on_main(self.world, doing, lambda: self._plan(info))
        staged: list[Path] = []

        def write() -> dict[str, FileChecksum]:
            staged.append(self._storage.stage(f"{name}-{token}"))
            written = snapshot.write(staged[0], self.world.rank)
            if self._storage.can_replace:
                self._storage.publish(staged[0], name, list(written))
            return written

        try:
            of_ranks = gather_from_all(self.world, doing, write)
            if not self._storage.can_replace:
                # Only now that all ranks have written, because what is in a bucket has its final name.
                if info.name is not None:
                    on_main(self.world, doing, lambda: self._remove_replaced(name))
                own = list(of_ranks[self.world.rank])
                on_all_ranks(self.world, doing, lambda: self._storage.publish(staged[0], name, own))
            files = {file: each for written in of_ranks for file, each in written.items()}

            def commit() -> Checkpoint:
                facts = Checkpoint(
                    path=self._storage.path_of(name),
                    step=info.step,
                    epoch=info.epoch,
                    metrics={key: float(value) for key, value in info.metrics.items()},
                    meta=dict(info.meta() if callable(info.meta) else info.meta),
                    world_size=self.world.size,
                    sequence=sequence,
                    time_s=time.time(),
                    writer=f"process {os.getpid()} on {socket.gethostname()}",
                    previous=next((each for each in reversed(self._chain) if each[0] != name), None)
                    if info.name is None
                    else None,
                )
                manifest = write_manifest(facts, files)
                checkpoint, _ = parse_manifest(facts.path, manifest)
                if info.name is None:
                    known = self._refuse_foreign()
                    # Set before the commit: if its reply is lost, the checkpoint found there is ours.
                    known.add(name)
                    self._sequence = sequence
                self._storage.commit(staged[0], name, manifest, files)
                if info.name is None:
                    self._chain = [*(each for each in self._chain if each[0] != name), (name, checkpoint.digest)][-2:]
                return checkpoint

            checkpoint = on_main(self.world, doing, commit)
            self._verified.discard(checkpoint.path)
            self._damaged.pop(checkpoint.path, None)
        except CheckpointError:
            for folder in staged:
                self._storage.abandon(folder, name)
            raise
        if self.world.is_main and info.name is None:
            try:
                self._retain(name, info.step)
            except Exception as error:
                # The checkpoint is committed, so a failed deletion must not fail the save on this rank alone.
                what = f"{checkpoint.path} is saved, but the checkpoints that it replaces could not be deleted"
                warnings.warn(f"{what} ({type(error).__name__}: {error})", CheckpointWarning, stacklevel=2)
        return checkpoint

    def list(self) -> list[Checkpoint]:
        """Return the checkpoints in commit order, unverified. Any process may call this."""
        return [entry.checkpoint for entry in scan(self._storage) if entry.checkpoint is not None]

    def best(self) -> Checkpoint | None:
        """Return the checkpoint with the best metric, unverified; None if none has it. Any process may call this."""
        return self._retention.best(self.of_this_run())

    def of_this_run(self) -> Sequence[Checkpoint]:
        """Return the checkpoints that this run has saved, without checkpoints of an earlier run in this directory."""
        return [each for each in self.list() if each.sequence > self.began_after]

    def contains(self, path: str) -> bool:
        """Whether a path or URI is that of a checkpoint of this store, existing or not. Any process may call this."""
        storage, name = split_path(path)
        return storage.path_of(name) == self._storage.path_of(name)

    def newest_good(self, *, up_to: int | None = None, is_loaded_next: bool = False) -> Checkpoint | None:
        """Return the newest intact checkpoint, or None if there is no checkpoint at all. Every rank must call this.

        Checkpoints of an earlier run in this directory do not count, nor do damaged ones before this run's first. Each
        skipped checkpoint is named in a `CheckpointWarning` on the main rank and in `skipped` on all ranks.

        Args:
            up_to: ignore checkpoints of later steps than this.
            is_loaded_next: check only the sizes of the tensor files, because `load` verifies them while it reads them.
                If it finds damage, call this again.

        Raises:
            CheckpointError: there are checkpoints, but all of them are damaged.
        """
        doing = f"look for checkpoints in {self._storage.path_of('')}"
        most = math.inf if up_to is None else up_to

        def look() -> Sequence[ScannedCheckpoint]:
            entries = self._scan()
            # It is unknown which run saved a damaged checkpoint.
            return [] if self._sequence == self.began_after > 0 else entries

        entries = [
            entry
            for entry in on_main(self.world, doing, look)
            if (each := entry.checkpoint) is None or (each.sequence > self.began_after and each.step <= most)
        ]
        self.skipped = []
        found: Checkpoint | None = None
        for entry in reversed(entries):
            if entry.checkpoint is not None:
                self._begin_fetching(entry.checkpoint)
            problem = (
                entry.problem
                or self._damaged.get(self._storage.path_of(entry.name))
                or self._verify(self._storage, entry.name, entry.files, is_loaded_next=is_loaded_next)
            )
            if entry.checkpoint is not None and problem is None:
                found = entry.checkpoint
                if not is_loaded_next:
                    self._verified.add(found.path)
                break
            self.skipped.append(f"{self._storage.path_of(entry.name)}: {problem}")
        if entries and found is None:
            raise CheckpointError(
                "none of the checkpoints can be read:\n  "
                + "\n  ".join(self.skipped)
                + "\nrestore one from a copy, or move them away to start over"
            )
        if self.world.is_main:
            for passed in self.skipped:
                warnings.warn(f"skipped a damaged checkpoint: {passed}", CheckpointWarning, stacklevel=2)
        return found

    def load(
        self, parts: Mapping[str, Stateful], *, rank_parts: Mapping[str, Stateful], checkpoint: Checkpoint
    ) -> Loaded:
        """Load the parts in their order, rank parts last, and return digests of them. Every rank must call this.

        Other parts of the checkpoint are not read. A rank part that is missing from the checkpoint keeps its initial
        state, with one warning, or without one on ranks beyond the number that saved. Loading runs no code of the
        checkpoint. If a run replaces it meanwhile by another of the same name, that one is loaded.

        Raises:
            DamagedCheckpointError: the checkpoint is damaged. Live tensors that it is read into are undefined.
            CheckpointError: the checkpoint lacks a part, or a part's `load_state_dict` failed.
        """
        doing = f"load {checkpoint.path}"
        storage, name = split_path(checkpoint.path)
        there, files = on_main(self.world, doing, lambda: parse_manifest(checkpoint.path, storage.read(name, MANIFEST)))
        if there.digest != checkpoint.digest:
            self._verified.discard(checkpoint.path)
        checkpoint = there
        self._begin_fetching(checkpoint)
        with self._fetched as scratch:

            def read() -> tuple[CheckpointReader, dict[str, str]]:
                is_verified = checkpoint.path in self._verified
                if not is_verified and (problem := self._verify(storage, name, files, is_loaded_next=True)):
                    raise CheckpointError(problem)
                unverified = (
                    {} if is_verified else {file: files[file] for file in filter(_has_tensors, self._share(files))}
                )
                self._fetch_together(storage, name, files, [file for file in files if not _has_tensors(file)])
                reader = CheckpointReader(storage, name, files, checkpoint.world_size, self.world, scratch)
                on_all_ranks(self.world, doing, reader.read_rank_files)
                reader.share_shards()
                on_all_ranks(self.world, doing, lambda: reader.allocate(parts))
                on_all_ranks(self.world, doing, lambda: reader.plan(unverified))
                self._fetch_together(storage, name, files, reader.needed)
                return reader, on_all_ranks(self.world, doing, reader.read_tensors)

            try:
                reader, tensors = read()
            except CheckpointError:
                now = on_main(self.world, doing, lambda: _read_if_there(checkpoint.path))
                if now is not None and now.digest != checkpoint.digest:
                    # Replaced in the meantime, so that some files were of one and some of the other.
                    return self.load(parts, rank_parts=rank_parts, checkpoint=now)
                if checkpoint.path in self._verified:
                    raise
                # Read it again to name all that is damaged, or because the storage has failed for a moment.
                if problem := self._verify(storage, name, files):
                    self._damaged[checkpoint.path] = problem
                    raise DamagedCheckpointError(f"{checkpoint.path} is damaged: {problem}") from None
                self._verified.add(checkpoint.path)
                reader, tensors = read()
            on_all_ranks(self.world, doing, lambda: reader.load_into(parts))
            absent, own = on_all_ranks(self.world, doing, lambda: reader.load_rank_parts(rank_parts))
        self._loaded.add(checkpoint.path)
        self._continued = None
        lacking = sorted({part for rank_absent in self.world.all_gather_object(absent) for part in rank_absent})
        if lacking and self.world.is_main:
            what = f"{checkpoint.path} has no {', '.join(lacking)} state for some rank, which keeps its initial one"
            warnings.warn(what, CheckpointWarning, stacklevel=2)
        return Loaded(tensors, own)

    def allow_replacing(self, checkpoint: Checkpoint) -> None:
        """Let a save of the same step replace the checkpoint that was loaded last.

        For a caller that has restored all of it, and saves the same state again with more metrics. No collectives.
        """
        self._continued = checkpoint.path

    def check_writable(self) -> None:
        """Write and delete an empty file, to detect early that saves would fail. Every rank must call this.

        Raises:
            CheckpointError: a rank cannot write here; raised on every rank.
        """

        def check() -> None:
            self._storage.check()
            if self.world.is_main and self._known is None:
                self._scan()

        on_all_ranks(self.world, f"write to {self._storage.path_of('')}", check)

    def remove_leftovers(self) -> None:
        """Delete the leftovers of killed saves, on the main rank. Every rank must call this, before the first save.

        Raises:
            CheckpointError: the folder cannot be listed.
        """

        def clean() -> None:
            for name in self._storage.leftovers():
                self._remove(name, self._storage.remove_leftover)

        on_main(self.world, f"look for leftovers of killed saves in {self._storage.path_of('')}", clean)

    def read(self, path: str) -> Checkpoint:
        """Read the manifest of a checkpoint, in any store. Every rank must call this.

        Raises:
            CheckpointError: there is no checkpoint at this path or URI.
        """
        return on_main(self.world, f"read {path}", lambda: read_checkpoint(path))

    def is_empty(self) -> bool:
        """Whether there is no checkpoint here, not even a damaged one. Every rank must call this."""
        return not on_main(self.world, f"look for checkpoints in {self._storage.path_of('')}", self._scan)

    def start_over(self) -> None:
        """Treat all existing checkpoints as an earlier run's. Every rank must call this.

        Each is kept until this run saves the same step; none counts as this run's best.

        Raises:
            CheckpointError: the folder cannot be listed.
        """
        self.remove_leftovers()
        entries = on_main(self.world, f"look for checkpoints in {self._storage.path_of('')}", self._scan)
        self.began_after = max((each.checkpoint.sequence for each in entries if each.checkpoint), default=0)

    def _plan(self, info: _CheckpointInfo) -> tuple[int, str, str]:
        """Return sequence number, name and token of the next save."""
        token = uuid.uuid4().hex[:8]
        if info.name is not None:
            self._check_replaceable(info.name)
            return 1, info.name, token
        if self._known is None:
            self._scan()
        self._refuse_foreign()
        taken = set(self._storage.names())
        name, count = _name(info.step), 1
        while name in taken and not self._may_replace(name):
            count += 1
            name = f"{_name(info.step)}.{count}"
        return self._sequence + 1, name, token

    def _may_replace(self, name: str) -> bool:
        """Whether a save may take the place of a checkpoint of the same step: the newest, if nothing needs it."""
        path = self._storage.path_of(name)
        return (
            self._storage.can_replace
            and name in (each for each, _ in self._chain[-1:])
            and (path not in self._loaded or path == self._continued)
            and not is_kept(self._storage, name)
        )

    def _check_replaceable(self, name: str) -> bool:
        """Return whether there is a checkpoint of this name, which a save may replace.

        Raises:
            CheckpointError: something else has this name.
        """
        for leftover in self._storage.replaced(name):
            self._storage.remove_leftover(leftover)
        if name not in self._storage.names():
            return False
        if not self._storage.has(name, MANIFEST):
            raise CheckpointError(f"{self._storage.path_of(name)} exists and is not a checkpoint: choose another path")
        return True

    def _remove_replaced(self, name: str) -> None:
        if self._check_replaceable(name):
            self._storage.remove(name)

    def _scan(self) -> Sequence[ScannedCheckpoint]:
        """Return all committed checkpoints; the first scan also records which existed before this store."""
        entries = scan(self._storage)
        if self._known is None:
            self._known = {entry.name for entry in entries}
            newest = next((entry for entry in reversed(entries) if entry.checkpoint), None)
            if newest is not None and newest.checkpoint is not None:
                self._sequence = newest.checkpoint.sequence
                before = newest.checkpoint.previous
                self._chain = [*([before] if before else []), (newest.name, newest.checkpoint.digest)]
        return entries

    def _refuse_foreign(self) -> set[str]:
        """Return the names of all checkpoints. Two runs in one directory would delete each other's checkpoints.

        Raises:
            CheckpointError: another process has saved a checkpoint here.
        """
        assert self._known is not None
        if (problem := self.ownership_problem()) is not None:
            raise ConcurrentWriterError(f"{problem}. Only one run may write here")
        there = set(self._storage.names())
        self._known &= there
        for name in sorted(there - self._known):
            if name.startswith("step-") and self._storage.committed(name):
                raise ConcurrentWriterError(
                    f"{_writer(self._storage, name)} has saved {name} here since this run started or resumed, but "
                    "only one run may write here. Stop one of the two, or set a different run_dir for each"
                )
        return self._known

    def _check_complete(self, doing: str, snapshot: Snapshot) -> None:
        """Check on the main rank that the ranks write each tensor once; needed only if what they write has changed."""
        ranks = self.world.gather_object(snapshot.layout.shards)

        def check() -> None:
            if wrong := missing_elements(ranks, snapshot.layout.num_elements):
                name, count = next(iter(wrong.items()))
                raise CheckpointError(
                    f"{abs(count)} elements of {name} would {'not be saved' if count > 0 else 'be saved twice'}: state "
                    "must have the same names on all ranks, and sharded tensors the device mesh of the run"
                )

        on_main(self.world, doing, check)
        self._complete_layout = snapshot.layout

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
        doomed += [there[each.path].name for each in self._retention.to_delete(checkpoints)]
        for name in doomed:
            if self._storage.path_of(name) not in self._loaded and not is_kept(self._storage, name):
                self._remove(name, self._storage.remove)
        if doomed:
            # Another process may reuse the name.
            assert self._known is not None
            self._known &= set(self._storage.names())

    def _remove(self, name: str, remove: Callable[[str], None]) -> None:
        try:
            remove(name)
        except FileNotFoundError:
            return  # deleted by another process
        except Exception as error:
            what = (
                f"could not delete {self._storage.path_of(name)} ({type(error).__name__}: {error}); delete it by hand"
            )
            warnings.warn(what, CheckpointWarning, stacklevel=4)

    def _verify(
        self, storage: Storage, name: str, files: Mapping[str, FileChecksum], *, is_loaded_next: bool = False
    ) -> str | None:
        """Return the problem with a checkpoint, or None, equal on every rank; the ranks divide the reading.

        If `load` is called next, which verifies the tensor files while it reads them, only their sizes are checked.
        """
        into = self._fetched.folder

        def problem_of(file: str) -> str | None:
            return verify_file(storage, name, file, files[file], into, only_size=is_loaded_next and _has_tensors(file))

        problems = gather_from_all(
            self.world,
            f"verify {storage.path_of(name)}",
            lambda: [problem for file in self._share(files) if (problem := problem_of(file))],
        )
        return "; ".join(problem for each in problems for problem in each) or None

    def _begin_fetching(self, checkpoint: Checkpoint) -> None:
        """Make a folder for copies of a checkpoint's remote files, if there is none. Every rank must call this."""
        if not self._fetched.is_of(checkpoint.digest):
            on_all_ranks(self.world, f"fetch {checkpoint.path}", lambda: self._fetched.begin(checkpoint.digest))
            self._fetched.share(self.world)

    def _fetch_together(
        self, storage: Storage, name: str, files: Mapping[str, FileChecksum], needed: Sequence[str]
    ) -> None:
        """Fetch the remote files that any rank needs, each once per machine. Every rank must call this.

        Errors are left to the ranks that read a file: it is then fetched again.
        """
        mine = self._fetched.divide(needed, lambda file: files[file].size_bytes, self.world)
        with contextlib.suppress(Exception):
            for file in mine:
                storage.fetch(name, file, self._fetched.folder)
        self.world.barrier()

    def _share(self, files: Mapping[str, FileChecksum]) -> Sequence[str]:
        """Return the files of a checkpoint that this rank verifies."""
        rank, size = self.world.rank, self.world.size
        if len({rank_of(file) for file in files}) >= size:
            # As many ranks as have saved it will load just these, so that they fetch each byte of a bucket once.
            return [file for file in files if rank_of(file) % size == rank]
        return sorted(files, key=lambda file: -files[file].size_bytes)[rank::size]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a rank has read from a checkpoint, to compare with the state of its parts afterwards.

    Attributes:
        tensors: digests of this rank's tensors and shards, by their places in the parts.
        rank_parts: digests of the state that belongs to this rank, by part and key.
    """

    tensors: Mapping[str, str]
    rank_parts: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class _CheckpointInfo:
    """Facts for the manifest of a checkpoint."""

    step: int
    epoch: int
    metrics: dict[str, float]
    meta: Meta
    name: str | None = None


def _writer(storage: Storage, name: str) -> str:
    with contextlib.suppress(CheckpointError, OSError):
        return parse_manifest(name, storage.read(name, MANIFEST))[0].writer or "another process"
    return "another process"


def _read_if_there(path: str) -> Checkpoint | None:
    with contextlib.suppress(CheckpointError):
        return read_checkpoint(path)
    return None


def _no_op() -> None:
    return


def _raise(error: Exception) -> NoReturn:
    raise error


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _has_tensors(file: str) -> bool:
    return file.endswith(".safetensors")
