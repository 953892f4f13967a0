"""The state of all parts at one instant, and the files that hold it."""

from __future__ import annotations

import heapq
import math
import operator
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate

from ..data.protocols import Stateful
from ..distributed.dtensor import own_part, to_local
from ..distributed.world import World
from ..errors import CheckpointError
from .format.file_checksums import FileChecksum
from .format.plain_values import PLAIN_TENSORS, Table, encode_state
from .format.strict_json import check_memory, dump_json
from .format.tensor_files import DTYPES, TensorFile

STATE = "state.json"
_MOST_DIMENSIONS = 64


def rank_json(rank: int) -> str:
    """Return the name of the JSON file of a rank: what its tensor file holds, and its own state."""
    return f"rank-{rank:05d}.json"


def tensor_file(rank: int) -> str:
    """Return the name of the tensor file of a rank."""
    return f"rank-{rank:05d}.safetensors"


def rank_of(file: str) -> int:
    """Return the rank that has written a file; 0 for a file of the main rank without a number."""
    found = re.match(r"rank-(\d{5})\.", file)
    return int(found[1]) if found else 0


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


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """How the ranks divide the shared tensors among them. Later saves of tensors of the same kinds use it again.

    Attributes:
        kinds: what the layout follows from, such as the names and shapes of the tensors.
        num_elements: of each shared tensor, by name.
        shards: by name, what this rank writes of the shared tensors.
    """

    kinds: list[Any]
    num_elements: dict[str, int]
    shards: dict[str, Shard]

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, torch.Tensor],
        world: World,
        is_replicated: Callable[[torch.Tensor], bool],
        last: Layout | None,
    ) -> Layout:
        """Return the layout of the last save if it is that of these tensors, too, or else a new one.

        Shards that have not changed are used again in any case: several new objects per tensor, alive until the save
        ends, would make Python's garbage collector go through all objects of the process.
        """
        values = tensors.values()
        columns = (map(operator.attrgetter(name), values) for name in ("shape", "dtype", "device"))
        sharded = [each for each in values if type(each) not in PLAIN_TENSORS and isinstance(each, DTensor)]
        kinds = [
            (world.rank, world.size), list(tensors), list(map(type, values)), *map(list, columns),
            [(each.device_mesh, each.placements, to_local(each).shape) for each in sharded],
            [is_replicated(each) for each in values if not isinstance(each, DTensor)] if world.size > 1 else [],
        ]  # fmt: skip
        if last is not None and kinds == last.kinds:
            return last
        num_elements = {name: tensor.numel() for name, tensor in tensors.items()}
        return cls(kinds, num_elements, _own_shards(tensors, world, is_replicated, last.shards if last else {}))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state that one rank saves. The tensors are live, so write them before the next update.

    Attributes:
        parts: by shared part, its encoded state.
        rank_parts: by part that belongs to this rank, its encoded state.
        layout: of the shared tensors.
        tensors: by name, the local tensors that this rank writes.
        rank_tensors: by name, copies of the tensors that belong to this rank.
    """

    parts: dict[str, Any]
    rank_parts: dict[str, Any]
    layout: Layout
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
        last: Layout | None = None,
        tables: dict[str, Table] | None = None,
    ) -> Snapshot:
        """Collect the state of every part.

        Args:
            parts: the parts that all ranks share.
            rank_parts: the parts that belong to this rank.
            world: the ranks that save.
            is_replicated: whether a shared tensor that is not sharded is equal on all ranks, so that any may write it;
                others are written by the main rank.
            last: layout of the previous snapshot.
            tables: of the previous snapshot, as `encode_state` takes them.

        Raises:
            CheckpointError: a state has something other than plain values and tensors, or tensors of two parts have the
                same name.
        """
        encoded: dict[str, Any] = {}
        tensors: dict[str, torch.Tensor] = {}
        for part, owner in parts.items():
            encoded[part], named = encode_state(part, owner.state_dict(), tables)
            _check_names(part, named, tensors)
            tensors.update(named)
        of_rank: dict[str, Any] = {}
        rank_tensors: dict[str, torch.Tensor] = {}
        for part, owner in rank_parts.items():
            of_rank[part], named = encode_state(part, owner.state_dict())
            _check_names(part, named, tensors, rank_tensors)
            rank_tensors |= {name: tensor.detach().to("cpu", copy=True) for name, tensor in named.items()}
        with torch.no_grad():  # of a sharded tensor, the local one itself
            layout = Layout.of(tensors, world, is_replicated, last)
            local = {
                name: each if type(each := tensors[name]) in PLAIN_TENSORS else to_local(each) for name in layout.shards
            }
        return cls(encoded, of_rank, layout, local, rank_tensors)

    def write(self, folder: Path, rank: int) -> dict[str, FileChecksum]:
        """Write this rank's files, and return them.

        Raises:
            CheckpointError: there are so many plain values that they could not be read again.
        """
        written = {tensor_file(rank): TensorFile(self.rank_tensors | self.tensors).write(folder / tensor_file(rank))}
        shards = {name: shard.as_json() for name, shard in self.layout.shards.items()}
        own = {name: _dtype_name(tensor.dtype) for name, tensor in self.rank_tensors.items()}
        contents: dict[str, Any] = {
            rank_json(rank): {"rank": rank, "tensors": shards, "own_tensors": own, "parts": self.rank_parts}
        }
        if rank == 0:
            contents[STATE] = {"parts": self.parts}
        for file, content in contents.items():
            text = dump_json(content)
            check_memory(text, file, written[tensor_file(rank)].size_bytes)
            (folder / file).write_bytes(text)
            # Of the bytes in memory, to detect corruption on the way to the disk as well.
            written[file] = FileChecksum.of_bytes(text)
        return written


def _check_names(part: str, named: Mapping[str, object], *others: Mapping[str, object]) -> None:
    for other in others:
        if not other.keys().isdisjoint(named):
            twice = min(other.keys() & named.keys())
            raise CheckpointError(f"two parts have a tensor {twice!r}: rename the part {part!r}")


def _own_shards(
    tensors: Mapping[str, torch.Tensor],
    world: World,
    is_replicated: Callable[[torch.Tensor], bool],
    known: Mapping[str, Shard],
) -> dict[str, Shard]:
    """Choose what this rank writes, as all ranks do without communication, so that each block is written once.

    Replicas of shards are divided by their names; whole tensors are written by the rank with the fewest bytes so far.
    """
    shards: dict[str, Shard] = {}
    loads = [(0, rank) for rank in range(world.size)]
    for name, tensor in tensors.items():
        shard: Shard | None = None
        if isinstance(tensor, DTensor):
            shard = _shard_of(name, tensor, world)
        else:
            rank = 0
            if world.size > 1 and is_replicated(tensor):
                load, rank = heapq.heappop(loads)
                heapq.heappush(loads, (load + tensor.nbytes, rank))
            if rank == world.rank:
                shard = Shard(rank, tensor.dtype, tensor.shape, (0,) * tensor.dim(), tensor.shape)
        if shard is not None:
            shards[name] = before if (before := known.get(name)) == shard else shard
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


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, (list, tuple)) or any(type(each) is not int or each < 0 for each in values):
        raise ValueError(f"expected integers >= 0, got {values!r:.99}")
    if len(values) > _MOST_DIMENSIONS:
        raise ValueError(f"a tensor has at most {_MOST_DIMENSIONS} dimensions, got {len(values)}")
    return tuple(values)
