"""Read one checkpoint into the parts of a run, at any number of ranks and any sharding."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..data.protocols import Mergeable, Stateful
from ..distributed.dtensor import own_part, to_local
from ..distributed.world import World
from ..errors import CheckpointError
from .format.digests import digests_by_key, tensor_digests
from .format.file_checksums import FileChecksum
from .format.plain_values import decode_state, tensor_names, tensor_places
from .format.strict_json import parse_json
from .format.tensor_files import DTYPES, TensorReader, open_tensors
from .load_target import load_part, target_allocator
from .snapshot import STATE, Shard, rank_json, rank_of, tensor_file
from .storage import Storage

_PREFIX, _ABANDONED_AFTER_S = "headway-load-", 60.0


class CheckpointReader:
    """Loads one checkpoint. Every rank must call all methods, in this order.

    Args:
        storage: storage of the checkpoint.
        name: name of the checkpoint in the storage.
        files: its files, from the manifest.
        num_ranks: number of ranks that saved it.
        world: the ranks that load it.
        scratch: folder for copies of remote files; only files that this rank needs are fetched.
    """

    def __init__(
        self,
        storage: Storage,
        name: str,
        files: Mapping[str, FileChecksum],
        num_ranks: int,
        world: World,
        scratch: Path,
    ) -> None:
        self._storage, self._name, self._files = storage, name, files
        self._num_ranks, self._world, self._scratch = num_ranks, world, scratch
        self._rank_files: dict[int, dict[str, Any]] = {}
        self._own: dict[str, list[Shard]] = {}
        self._shards: dict[str, list[Shard]] = {}
        self._encoded: dict[str, Any] = {}
        self._targets: dict[str, torch.Tensor] = {}
        self._unverified: Mapping[str, FileChecksum] = {}
        # By rank whose file has them.
        self._wholes: dict[int, dict[str, torch.Tensor]] = {}
        self._blocks: dict[int, list[tuple[torch.Tensor, str, Shard, tuple[slice, ...]]]] = {}

    def read_rank_files(self) -> None:
        """Read this rank's share of what the tensor files hold."""
        for rank in self._ranks():
            content = self._read_json(rank_json(rank), "rank", "tensors", "own_tensors", "parts")
            if content["rank"] != rank:
                raise CheckpointError(f"{rank_json(rank)} is that of rank {content['rank']}")
            self._rank_files[rank] = content
            shards = {name: Shard.from_json(rank, name, entry) for name, entry in content["tensors"].items()}
            needed = sum(math.prod(each.sizes) * each.dtype.itemsize for each in shards.values())
            there = self._file(tensor_file(rank)).size_bytes
            if needed > there:
                raise CheckpointError(f"{rank_json(rank)} names {needed} bytes of tensors, and the file has {there}")
            for name, shard in shards.items():
                self._own.setdefault(name, []).append(shard)

    def share_shards(self) -> None:
        """Exchange what all ranks have read."""
        for shards in self._world.all_gather_object(self._own):
            for name, each in shards.items():
                self._shards.setdefault(name, []).extend(each)

    def allocate(self, parts: Mapping[str, Stateful]) -> None:
        """Read the plain values, and allocate the tensors.

        Raises:
            CheckpointError: the checkpoint lacks a part.
        """
        self._encoded = self._read_json(STATE, "parts")["parts"]
        if missing := sorted(parts.keys() - self._encoded.keys()):
            raise CheckpointError(f"it has no {', '.join(missing)}; it has {', '.join(sorted(self._encoded))}")
        for part, owner in parts.items():
            allocate = target_allocator(part, owner)
            for name in tensor_names(self._encoded[part]):
                if name not in self._targets:
                    dtype, shape = self._layout(name)
                    self._targets[name] = allocate(name, torch.Size(shape), dtype)

    def plan(self, unverified: Mapping[str, FileChecksum]) -> None:
        """Find what this rank reads, of sharded tensors its own shards.

        Args:
            unverified: tensor files that this rank verifies while it reads.
        """
        self._unverified = unverified
        for name, target in self._targets.items():
            local = to_local(target).detach()
            if not local.numel():
                continue
            offset = [each.start for each in own_part(target)] if isinstance(target, DTensor) else [0] * local.dim()
            found = []
            for shard in self._shards[name]:
                if (index := shard.overlap(offset, local.shape)) is not None:
                    there = tuple(slice(s.start - at, s.stop - at) for s, at in zip(index, shard.offset, strict=True))
                    here = tuple(slice(s.start - at, s.stop - at) for s, at in zip(index, offset, strict=True))
                    found.append(here)
                    is_whole = shard.sizes == local.shape == tuple(s.stop - s.start for s in here)
                    if is_whole and local.dtype == shard.dtype:
                        self._wholes.setdefault(shard.rank, {})[name] = local
                    self._blocks.setdefault(shard.rank, []).append((local[here], name, shard, there))
            if not _cover(found, local.shape):
                raise CheckpointError(f"{name}: the blocks of the ranks overlap, or leave out a part of it")

    @property
    def needed(self) -> list[str]:
        """The tensor files that this rank reads, known after `plan`."""
        return [
            tensor_file(rank) for rank in sorted(self._blocks.keys() | {rank_of(file) for file in self._unverified})
        ]

    def read_tensors(self) -> dict[str, str]:
        """Read the tensors, and return digests of what was read, by their places in the parts."""
        known: dict[str, str] = {}
        for file in self.needed:
            rank = rank_of(file)
            whole = self._wholes.get(rank, {})
            with open_tensors(self._fetch(file)) as reader, torch.no_grad():
                for into, name, shard, index in self._blocks.get(rank, []):
                    block = reader.read(name, shard.dtype, shard.sizes, index)
                    if name not in whole:
                        into.copy_(block)
                known |= reader.read_into(whole, check=self._unverified.get(file))
        digests = tensor_digests({name: to_local(target) for name, target in self._targets.items()}, known)
        return {
            place: digests[name]
            for part, encoded in self._encoded.items()
            for place, name in tensor_places(encoded, part)
            if name in digests  # of the parts that are loaded
        }

    def load_into(self, parts: Mapping[str, Stateful]) -> None:
        """Load the shared parts.

        Raises:
            CheckpointError: a part's `load_state_dict` failed; that error is the cause.
        """
        for part, owner in parts.items():
            load_part(part, owner.load_state_dict, decode_state(self._encoded[part], self._targets.__getitem__))

    def load_rank_parts(self, rank_parts: Mapping[str, Stateful]) -> tuple[list[str], dict[str, dict[str, str]]]:
        """Load the parts that belong to this rank.

        If fewer ranks load than saved, the states of those that are gone are divided among the others, for parts that
        can merge states.

        Returns:
            The names of parts that were not saved, and digests of what was loaded, by part and key; without parts into
            which other states were merged.
        """
        absent: list[str] = []
        digests: dict[str, dict[str, str]] = {}
        for nth, rank in enumerate(self._ranks()):
            wanted = {name: each for name, each in rank_parts.items() if nth == 0 or isinstance(each, Mergeable)}
            if not wanted:
                continue
            stored, dtypes = self._rank_files[rank]["parts"], self._rank_files[rank]["own_tensors"]
            with open_tensors(self._fetch(tensor_file(rank))) as file:

                def tensor(name: str, file: TensorReader = file, dtypes: Mapping[str, str] = dtypes) -> torch.Tensor:
                    if dtypes.get(name) not in DTYPES:
                        raise CheckpointError(f"a rank's own tensor {name!r} has the type {dtypes.get(name)!r}")
                    return file.read(name, DTYPES[dtypes[name]]).clone()

                for part, owner in wanted.items():
                    if part in stored:
                        take = owner.add_state_dict if nth and isinstance(owner, Mergeable) else owner.load_state_dict
                        load_part(part, take, decode_state(stored[part], tensor))
                        if nth:
                            digests.pop(part, None)
                        else:
                            digests[part] = digests_by_key(stored[part], tensor)
            absent = absent or sorted(wanted.keys() - stored.keys())
        return absent, digests

    def _ranks(self) -> range:
        """Return the ranks whose own state this rank gets."""
        return range(self._world.rank, self._num_ranks, self._world.size)

    def _layout(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return type and shape of a tensor, once it is known that the files have all of it."""
        shards = self._shards.get(name, [])
        layouts = {(each.dtype, each.shape) for each in shards}
        if len(layouts) != 1:
            raise CheckpointError(f"{name} has {len(layouts)} shapes and types" if layouts else f"no file has {name}")
        (layout,) = layouts
        if (there := sum(math.prod(each.sizes) for each in shards)) != math.prod(layout[1]):
            raise CheckpointError(f"{name} has {math.prod(layout[1])} elements, and the files have {there}")
        return layout

    def _file(self, file: str) -> FileChecksum:
        if file not in self._files:
            raise CheckpointError(f"the manifest names no {file}")
        return self._files[file]

    def _read_json(self, file: str, *keys: str) -> dict[str, Any]:
        tensor_bytes = sum(each.size_bytes for name, each in self._files.items() if name.endswith(".safetensors"))
        content = parse_json(self._fetch(file).read_bytes(), file, tensor_bytes=tensor_bytes)
        if not isinstance(content, dict) or not content.keys() >= set(keys):
            raise CheckpointError(f"{file} must be an object with {', '.join(keys)}")
        if wrong := [key for key in keys if key != "rank" and not isinstance(content[key], dict)]:
            raise CheckpointError(f"{file}: {wrong[0]} must be an object")
        return content

    def _fetch(self, file: str) -> Path:
        self._file(file)
        return self._storage.fetch(self._name, file, self._scratch)


class FetchedFiles:
    """Copies of the remote files of one checkpoint, kept from their verification until they have been loaded.

    Ranks that can write to the same temporary folders, as on one machine, share one copy of each file.

    A context manager that returns the folder, and deletes it; the other ranks must be done with it.
    """

    def __init__(self) -> None:
        self._of: str | None = None
        self._delete: Callable[[], object] = lambda: None
        self._folder: Path | None = None
        self._sharers: Sequence[int] = ()

    def is_of(self, digest: str) -> bool:
        """Whether these are copies of files of the checkpoint with this digest."""
        return digest == self._of

    def begin(self, digest: str) -> None:
        """Delete the copies of another checkpoint, and make a folder for those of the one with this digest."""
        self.__exit__()
        _delete_abandoned()
        self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._delete = weakref.finalize(self, _unlock_and_delete, self._folder, _lock(self._folder))
        self._of = digest

    def share(self, world: World) -> None:
        """Choose one folder among those of all ranks. Every rank must call this after `begin`."""
        folders = world.all_gather_object(str(self._folder))
        # Their names are random, so a path that exists here is the folder of a rank that sees the same file system.
        chosen = next(each for each in folders if os.access(each, os.W_OK))
        self._folder = Path(chosen)
        self._sharers = [rank for rank, each in enumerate(world.all_gather_object(chosen)) if each == chosen]

    def divide(self, needed: Sequence[str], size_of: Callable[[str], int], world: World) -> list[str]:
        """Return the files that this rank fetches for all that share its folder. Every rank must call this.

        Args:
            needed: names of the files that this rank needs.
            size_of: size of a file.
            world: the ranks that load.
        """
        of_ranks = world.all_gather_object(needed)
        files = {file for rank in self._sharers for file in of_ranks[rank]}
        in_order = sorted(files, key=lambda file: (-size_of(file), file))
        return in_order[self._sharers.index(world.rank) :: len(self._sharers)]

    @property
    def folder(self) -> Path:
        """The folder of the copies."""
        assert self._folder is not None
        return self._folder

    def __enter__(self) -> Path:
        return self.folder

    def __exit__(self, *_: object) -> None:
        self._delete()
        self._folder = self._of = None


def _lock(folder: Path) -> int | None:
    """Lock a folder until its file descriptor, which this returns, is closed or the process ends; None if another has.

    None also where the file system has no locks.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _unlock_and_delete(folder: Path, descriptor: int | None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if descriptor is not None:
        os.close(descriptor)


def _delete_abandoned() -> None:
    """Delete the folders of killed processes, whose locks the kernel has released."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            # A newer one may not have its lock yet.
            if time.time() - folder.stat().st_mtime > _ABANDONED_AFTER_S and (lock := _lock(folder)) is not None:
                _unlock_and_delete(folder, lock)


def _cover(blocks: Sequence[tuple[slice, ...]], shape: Sequence[int]) -> bool:
    """Whether blocks inside a region cover each element of it exactly once."""
    if len(blocks) == 1:
        return all(each == slice(0, size) for each, size in zip(blocks[0], shape, strict=True))
    volumes = sum(math.prod(each.stop - each.start for each in block) for block in blocks)
    if volumes != math.prod(shape):
        return False
    edges = sorted(tuple((each.start, each.stop) for each in block) for block in blocks)
    divided = [dim for dim in range(len(shape)) if len({block[dim] for block in edges}) > 1]
    if len(divided) == 1:
        ends = [block[divided[0]] for block in edges]
        return all(one[1] == other[0] for one, other in zip(ends, ends[1:], strict=False))
    return not any(
        all(one[dim][0] < other[dim][1] and other[dim][0] < one[dim][1] for dim in divided)
        for nth, one in enumerate(edges)
        for other in edges[nth + 1 :]
    )
