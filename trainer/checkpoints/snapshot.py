"""The state of all parts at one instant, written to files or kept in memory, and read back."""

from __future__ import annotations

import heapq
import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch.distributed.tensor import DTensor, Replicate

from ..data.protocols import Mergeable, Stateful
from ..distributed.dtensor import own_part, to_local
from ..distributed.world import World
from ..errors import CheckpointError, ResumeError
from .format.digests import digests_by_key, tensor_digest
from .format.file_checksums import FileChecksum
from .format.plain_values import decode_state, encode_state, iter_tensors, tensor_names
from .format.strict_json import dump_json, parse_json
from .format.tensor_files import DTYPES, TensorFile, TensorReader, open_tensors
from .storage import Storage

STATE = "state.json"
_MOST_DIMENSIONS = 64


def rank_json(rank: int) -> str:
    """Return the name of the JSON file of a rank: what its tensor file holds, and its own state."""
    return f"rank-{rank:05d}.json"


def tensor_file(rank: int) -> str:
    """Return the name of the tensor file of a rank."""
    return f"rank-{rank:05d}.safetensors"


def rank_of(file: str) -> int:
    """Return the rank that has written a file; 0 for those of the main rank."""
    found = re.match(r"rank-(\d{5})\.", file)
    return int(found[1]) if found else 0


@runtime_checkable
class SupportsLoadTarget(Protocol):
    """A part that provides tensors for a checkpoint to be read into before `load_state_dict`."""

    def load_target(self, path: tuple[str, ...], size: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the tensor to fill, which may be sharded or live; None to let the store allocate one.

        Args:
            path: keys of the tensor in the part's nested state.
            size: size of the full tensor, over all ranks.
            dtype: saved dtype of the tensor.
        """


class Shard(NamedTuple):
    """A block of a tensor in the file of one rank.

    Attributes:
        rank: the rank whose file has it.
        dtype: type of the tensor.
        shape: shape of the whole tensor.
        offset: position of the block in the whole tensor, per dimension.
        sizes: shape of the block.
    """

    rank: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    sizes: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the entry in the rank's JSON file; without a position if it is the whole tensor."""
        entry: dict[str, Any] = {"dtype": _dtype_name(self.dtype), "shape": list(self.shape)}
        if self.sizes != self.shape:
            entry |= {"offset": list(self.offset), "sizes": list(self.sizes)}
        return entry

    @classmethod
    def from_json(cls, rank: int, name: str, entry: Any) -> Shard:
        """Parse an entry.

        Raises:
            CheckpointError: it is invalid, or the block lies outside of the tensor.
        """
        try:
            shape = _sizes(entry["shape"])
            offset = _sizes(entry.get("offset", [0] * len(shape)))
            shard = cls(rank, DTYPES[entry["dtype"]], shape, offset, _sizes(entry.get("sizes", shape)))
            fits = all(at + size <= whole for at, size, whole in zip(offset, shard.sizes, shape, strict=True))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{rank_json(rank)}: the entry of {name} is invalid ({type(error).__name__}: {error})"
            ) from error
        if not fits or math.prod(each for each in shape if each) >= 1 << 63:
            raise CheckpointError(f"{rank_json(rank)}: the block of {name} lies outside of it: {entry}")
        return shard

    def overlap(self, offset: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...] | None:
        """Return the part of a region that this block has, as an index into the whole tensor; None if it has none."""
        index = []
        for mine, size, at, wanted in zip(self.offset, self.sizes, offset, sizes, strict=True):
            begin, end = max(mine, at), min(mine + size, at + wanted)
            if begin >= end:
                return None
            index.append(slice(begin, end))
        return tuple(index)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state that one rank saves. The tensors are live, so write them before the next update.

    Attributes:
        parts: by shared part, its encoded state.
        rank_parts: by part that belongs to this rank, its encoded state.
        num_elements: of each shared tensor, by name.
        shards: by name, what this rank writes of the shared tensors.
        tensors: by name, the local tensors that it writes.
        rank_tensors: by name, copies of the tensors that belong to this rank.
    """

    parts: dict[str, Any]
    rank_parts: dict[str, Any]
    num_elements: dict[str, int]
    shards: dict[str, Shard]
    tensors: dict[str, torch.Tensor]
    rank_tensors: dict[str, torch.Tensor]

    @classmethod
    def of(
        cls,
        parts: Mapping[str, Stateful],
        rank_parts: Mapping[str, Stateful],
        *,
        world: World,
        is_replicated: Callable[[torch.Tensor], bool] = lambda _: True,
    ) -> Snapshot:
        """Collect the state of every part.

        Args:
            parts: the parts that all ranks share.
            rank_parts: the parts that belong to this rank.
            world: the ranks that save.
            is_replicated: whether a shared tensor that is not sharded is equal on all ranks, so that any may write it;
                others are written by the main rank.

        Raises:
            CheckpointError: a state has something other than plain values and tensors, or tensors of two parts have the
                same name.
        """
        encoded: dict[str, Any] = {}
        tensors: dict[str, torch.Tensor] = {}
        for part, owner in parts.items():
            encoded[part], named = encode_state(part, owner.state_dict())
            _check_names(part, named, tensors)
            tensors |= named
        of_rank: dict[str, Any] = {}
        rank_tensors: dict[str, torch.Tensor] = {}
        for part, owner in rank_parts.items():
            of_rank[part], named = encode_state(part, owner.state_dict())
            _check_names(part, named, tensors.keys() | rank_tensors.keys())
            rank_tensors |= {name: tensor.to("cpu", copy=True) for name, tensor in named.items()}
        shards = _own_shards(tensors, world, is_replicated)
        num_elements = {name: tensor.numel() for name, tensor in tensors.items()}
        local = {name: to_local(each) if isinstance(each := tensors[name], DTensor) else each for name in shards}
        return cls(encoded, of_rank, num_elements, shards, local, rank_tensors)

    def write_tensors(self, folder: Path, rank: int) -> FileChecksum:
        """Write this rank's tensor file."""
        return TensorFile(self.rank_tensors | self.tensors).write(folder / tensor_file(rank))

    def write_json(self, folder: Path, rank: int) -> dict[str, FileChecksum]:
        """Write this rank's other files, and return them."""
        shards = {name: shard.as_json() for name, shard in self.shards.items()}
        own = {name: _dtype_name(tensor.dtype) for name, tensor in self.rank_tensors.items()}
        files: dict[str, Any] = {
            rank_json(rank): {"rank": rank, "tensors": shards, "own_tensors": own, "parts": self.rank_parts}
        }
        if rank == 0:
            files[STATE] = {"parts": self.parts}
        for file, content in files.items():
            (folder / file).write_bytes(dump_json(content))
        return {file: FileChecksum.of(folder / file) for file in files}


def _check_names(part: str, named: Iterable[str], taken: Iterable[str]) -> None:
    if twice := set(named) & set(taken):
        raise CheckpointError(f"two parts have a tensor {min(twice)!r}: rename the part {part!r}")


def _own_shards(
    tensors: Mapping[str, torch.Tensor], world: World, is_replicated: Callable[[torch.Tensor], bool]
) -> dict[str, Shard]:
    """Choose what this rank writes, as all ranks do without communication, so that each block is written once.

    Replicas of shards are divided by their names; whole tensors are written by the rank with the fewest bytes so far.
    """
    shards: dict[str, Shard] = {}
    loads = [(0, rank) for rank in range(world.size)]
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            if (shard := _shard_of(name, tensor, world)) is not None:
                shards[name] = shard
            continue
        rank = 0
        if world.size > 1 and is_replicated(tensor):
            load, rank = heapq.heappop(loads)
            heapq.heappush(loads, (load + tensor.nbytes, rank))
        if rank == world.rank:
            shape = tensor.shape
            shards[name] = Shard(rank, tensor.dtype, shape, (0,) * len(shape), shape)
    return shards


def _shard_of(name: str, tensor: DTensor, world: World) -> Shard | None:
    """Return the block of a sharded tensor that this rank writes; None if it has none, or another rank writes it."""
    local, shape = to_local(tensor), tuple(tensor.shape)
    if not tensor.numel():
        return Shard(0, tensor.dtype, shape, (0,) * len(shape), shape) if world.is_main else None
    # With tensor parallelism, several groups of ranks may have the whole tensor.
    if not local.numel() or int(tensor.device_mesh.mesh.min()):
        return None
    replica, replicas = 0, 1
    coordinate: Sequence[int] = tensor.device_mesh.get_coordinate() or []
    for place, size, kind in zip(coordinate, tensor.device_mesh.shape, tensor.placements, strict=True):
        if isinstance(kind, Replicate):
            replica, replicas = replica * size + place, replicas * size
    if replica != zlib.crc32(name.encode()) % replicas:
        return None
    offset = tuple(each.start for each in own_part(tensor))
    return Shard(world.rank, tensor.dtype, shape, offset, tuple(local.shape))


def missing_elements(ranks: Sequence[Mapping[str, Shard]], num_elements: Mapping[str, int]) -> dict[str, int]:
    """Return, by name, how many elements of a tensor no rank writes; negative if some are written twice."""
    left = dict(num_elements)
    for shards in ranks:
        for name, shard in shards.items():
            left[name] = left.get(name, 0) - math.prod(shard.sizes)
    return {name: count for name, count in left.items() if count}


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
            live: dict[str, torch.Tensor] = {}
            if not isinstance(owner, SupportsLoadTarget):
                live = {"/".join((part, *path)): tensor for path, tensor in iter_tensors(owner.state_dict())}
            for name in tensor_names(self._encoded[part]):
                if name not in self._targets:
                    dtype, shape = self._layout(name)
                    self._targets[name] = allocate_target(part, owner, live, name, torch.Size(shape), dtype)

    def read_tensors(self) -> dict[str, str]:
        """Read the tensors, of sharded ones this rank's shards, and return digests of what was read, by name."""
        copies: dict[int, list[tuple[torch.Tensor, str, Shard, tuple[slice, ...]]]] = {}
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
                    copies.setdefault(shard.rank, []).append((local[here], name, shard, there))
            if not _cover(found, local.shape):
                raise CheckpointError(f"{name}: the blocks of the ranks overlap, or leave out a part of it")
        for rank, wanted in sorted(copies.items()):
            with open_tensors(self._fetch(tensor_file(rank))) as file, torch.no_grad():
                for into, name, shard, index in wanted:
                    file.read_into(into, name, shard.dtype, shard.sizes, index)
        return {name: tensor_digest(to_local(target)) for name, target in self._targets.items()}

    def load_into(self, parts: Mapping[str, Stateful]) -> None:
        """Load the shared parts.

        Raises:
            CheckpointError: a part's `load_state_dict` failed; that error is the cause.
        """
        for part, owner in parts.items():
            _load_part(part, owner.load_state_dict, decode_state(self._encoded[part], self._targets.__getitem__))

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
                        _load_part(part, take, decode_state(stored[part], tensor))
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
        content = parse_json(self._fetch(file).read_bytes(), file)
        if not isinstance(content, dict) or not content.keys() >= set(keys):
            raise CheckpointError(f"{file} must be an object with {', '.join(keys)}")
        if wrong := [key for key in keys if key != "rank" and not isinstance(content[key], dict)]:
            raise CheckpointError(f"{file}: {wrong[0]} must be an object")
        return content

    def _fetch(self, file: str) -> Path:
        self._file(file)
        return self._storage.fetch(self._name, file, self._scratch)


def allocate_target(
    part: str, owner: object, live: Mapping[str, torch.Tensor], name: str, size: torch.Size, dtype: torch.dtype
) -> torch.Tensor:
    """Return the tensor into which the tensor `name` of a checkpoint is read.

    Only a part itself may provide the live tensor: two parts may share one, such as an average that still equals its
    model.
    """
    if isinstance(owner, SupportsLoadTarget):
        placed = owner.load_target(tuple(name[len(part) + 1 :].split("/")), size, dtype)
        if placed is not None:
            return placed
    like = live.get(name)
    if isinstance(like, DTensor) and like.shape == size:
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    return torch.empty(size, dtype=dtype)


def _load_part(part: str, take: Callable[[Any], object], state: Any) -> None:
    try:
        take(state)
    except Exception as error:
        raise CheckpointError(f"part {part!r} cannot load its state: {type(error).__name__}: {error}") from error


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


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, (list, tuple)) or any(type(each) is not int or each < 0 for each in values):
        raise ValueError(f"expected integers >= 0, got {values!r:.99}")
    if len(values) > _MOST_DIMENSIONS:
        raise ValueError(f"a tensor has at most {_MOST_DIMENSIONS} dimensions, got {len(values)}")
    return tuple(values)


# ---- In memory -------------------------------------------------------------------------------------------------------


def capture_state(parts: Mapping[str, Stateful], rank_parts: Mapping[str, Stateful], world: World) -> dict[str, Any]:
    """Return a copy of the state on this rank, in host memory; of sharded tensors this rank's shards.

    Raises:
        CheckpointError: a state has something other than plain values and tensors.
    """
    of_parts = {part: encode_state(part, owner.state_dict()) for part, owner in parts.items()}
    of_rank = {part: encode_state(part, owner.state_dict()) for part, owner in rank_parts.items()}
    tensors = {name: tensor for _, named in of_parts.values() for name, tensor in named.items()}
    return {
        "world_size": world.size,
        "rank": world.rank,
        "parts": {part: encoded for part, (encoded, _) in of_parts.items()},
        "layouts": {name: (tuple(tensor.shape), _sharding(tensor)) for name, tensor in tensors.items()},
        "tensors": {name: to_local(tensor).to("cpu", copy=True) for name, tensor in tensors.items()},
        "rank_parts": {
            part: (encoded, {name: tensor.to("cpu", copy=True) for name, tensor in named.items()})
            for part, (encoded, named) in of_rank.items()
        },
    }


def check_is_own_state(state: Mapping[str, Any], world: World) -> None:
    """Check that a state was captured on this rank. Every rank must call this.

    Raises:
        ResumeError: on every rank, if it was not on one of them.
    """
    found = [(each.get("world_size"), each.get("rank")) for each in world.all_gather_object(_whose(state))]
    if wrong := [(rank, *of) for rank, of in enumerate(found) if of != (world.size, rank)]:
        rank, size, whose = wrong[0]
        raise ResumeError(
            f"rank {rank} of {world.size} was given a state of rank {whose} of {size}: each rank must load what "
            "state_dict() returned on it; for another number of ranks, use save_checkpoint(path) and fit(resume=path)"
        )


def _whose(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: state.get(key) for key in ("world_size", "rank")}


def restore_state(
    state: Mapping[str, Any], parts: Mapping[str, Stateful], rank_parts: Mapping[str, Stateful], world: World
) -> None:
    """Load the parts in their order, rank parts last. The state can be loaded again. Every rank must call this.

    Raises:
        CheckpointError: on every rank, if a part of one rank cannot load its state.
    """
    failure: Exception | None = None
    part = ""
    try:
        if missing := sorted(parts.keys() - state["parts"].keys()):
            raise CheckpointError(f"it has no {', '.join(missing)}")
        for part, owner in parts.items():
            owner.load_state_dict(_decode_captured(state, part, owner))
        for part, owner in rank_parts.items():
            encoded, tensors = state["rank_parts"][part]
            # Copies, because a part may change what it loads.
            copies = {name: tensor.clone() for name, tensor in tensors.items()}
            owner.load_state_dict(decode_state(encoded, copies.__getitem__))
    except Exception as error:
        failure = error
    own = None if failure is None else f"part {part!r} of rank {world.rank}: {type(failure).__name__}: {failure}"
    if problems := [each for each in world.all_gather_object(own) if each]:
        raise CheckpointError(f"cannot load the state: {'; '.join(problems)}") from failure


def _decode_captured(state: Mapping[str, Any], part: str, owner: Stateful) -> Any:
    live: dict[str, torch.Tensor] = {}
    if not isinstance(owner, SupportsLoadTarget):
        live = {"/".join((part, *path)): tensor for path, tensor in iter_tensors(owner.state_dict())}

    def filled(name: str) -> torch.Tensor:
        saved, (shape, sharding) = state["tensors"][name], state["layouts"][name]
        target = allocate_target(part, owner, live, name, torch.Size(shape), saved.dtype)
        if _sharding(target) != sharding:
            raise ResumeError(
                f"{name} was {sharding or 'not sharded'} and is now {_sharding(target) or 'not sharded'}: load a state "
                "under the strategy and sizes of config.parallel under which it was captured, or use "
                "save_checkpoint(path) and fit(resume=path)"
            )
        with torch.no_grad():
            to_local(target).copy_(saved)
        return target

    return decode_state(state["parts"][part], filled)


def _sharding(tensor: torch.Tensor) -> str:
    """Describe how a tensor is divided among the ranks; empty if it is not."""
    if not isinstance(tensor, DTensor):
        return ""
    return f"sharded as {list(tensor.placements)} over {tuple(tensor.device_mesh.shape)} ranks"
