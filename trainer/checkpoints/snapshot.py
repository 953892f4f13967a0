"""The state of all parts at one instant, written to files or kept in memory, and read back."""

from __future__ import annotations

import io
import json
import os
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from ..data.protocols import Mergeable, Stateful
from ..distributed.dtensor import to_local
from ..distributed.world import World
from ..errors import CheckpointError, ResumeError
from .dcp_writer import METADATA
from .file_checksums import FileChecksum
from .state_codec import SupportsLoadTarget, allocate_target, decode_state, encode_state, iter_tensors
from .storage import Storage
from .tensor_checksums import TensorChecksum, digest_of

_STRUCTURES = "parts.pkl"
TENSOR_CHECKSUMS = "tensors.json"


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state that one rank saves. The tensors are live, so write them before the next update.

    Attributes:
        structures: by shared part, a function that returns its pickled structure.
        tensors: by name, the tensors of the shared parts that this rank may write.
        rank_states: structure and tensors of each part that belongs to this rank.
    """

    structures: dict[str, Callable[[], bytes]]
    tensors: dict[str, torch.Tensor]
    rank_states: dict[str, tuple[Callable[[], bytes], dict[str, torch.Tensor]]]

    @classmethod
    def of(
        cls,
        parts: Mapping[str, Stateful],
        rank_parts: Mapping[str, Stateful],
        *,
        writes: Callable[[torch.Tensor], bool] = lambda _: True,
    ) -> Snapshot:
        """Collect the state of every part.

        Args:
            parts: the parts that all ranks share.
            rank_parts: the parts that belong to this rank.
            writes: whether this rank may write a shared tensor that is not sharded.

        Raises:
            CheckpointError: a state cannot be pickled, or tensors of two parts have the same name.
        """
        structures: dict[str, Callable[[], bytes]] = {}
        tensors: dict[str, torch.Tensor] = {}
        for part, owner in parts.items():
            structures[part], named = encode_state(part, owner.state_dict())
            if twice := named.keys() & tensors.keys():
                raise CheckpointError(f"two parts have a tensor {min(twice)!r}: rename the part {part!r}")
            tensors |= {name: each for name, each in named.items() if isinstance(each, DTensor) or writes(each)}
        rank_states = {}
        for part, owner in rank_parts.items():
            structure, named = encode_state(part, owner.state_dict())
            rank_states[part] = (structure, {name: tensor.to("cpu", copy=True) for name, tensor in named.items()})
        return cls(structures, tensors, rank_states)

    def digests(self) -> dict[str, Any]:
        """Return digests of the state that belongs to this rank, by part and key."""
        digests: dict[str, Any] = {}
        for part, (structure, tensors) in self.rank_states.items():
            state = decode_state(structure(), tensors.__getitem__)
            digests[part] = {str(key): digest_of(value) for key, value in state.items()}
        return digests

    def write_other_files(
        self, folder: Path, world: World, sums: Mapping[str, TensorChecksum]
    ) -> dict[str, FileChecksum]:
        """Write everything but the shared tensors, after those, and return the files."""
        stream = io.BytesIO()
        torch.save({part: (structure(), tensors) for part, (structure, tensors) in self.rank_states.items()}, stream)
        (folder / _rank_file(world.rank)).write_bytes(stream.getbuffer())
        files = [_rank_file(world.rank)]
        if world.is_main:
            (folder / _STRUCTURES).write_bytes(
                pickle.dumps({part: structure() for part, structure in self.structures.items()})
            )
            (folder / TENSOR_CHECKSUMS).write_text(
                json.dumps({name: str(each) for name, each in sums.items()}, indent=1)
            )
            files += [_STRUCTURES, METADATA, TENSOR_CHECKSUMS]
        return {file: FileChecksum.of(folder / file) for file in files}


class CheckpointReader:
    """Loads one checkpoint. Every rank must call all methods, in this order.

    Args:
        storage: storage of the checkpoint.
        name: name of the checkpoint in the storage.
        scratch: folder for copies of remote files; only files that this rank needs are fetched.
    """

    def __init__(self, storage: Storage, name: str, scratch: Path) -> None:
        self._storage = storage
        self._name = name
        self._scratch = scratch
        self._states: dict[str, Any] = {}
        self._targets: dict[str, torch.Tensor] = {}

    def read_structures(self, parts: Mapping[str, Stateful]) -> None:
        """Rebuild the states with empty tensors.

        Raises:
            CheckpointError: the checkpoint lacks a part.
        """
        structures: dict[str, bytes] = pickle.loads(self._fetch(_STRUCTURES).read_bytes())
        if missing := sorted(parts.keys() - structures.keys()):
            raise CheckpointError(f"it has no {', '.join(missing)}; it has {', '.join(sorted(structures))}")
        metadata: Metadata = pickle.loads(self._fetch(METADATA).read_bytes())
        for part, owner in parts.items():
            live: dict[str, torch.Tensor] = {}
            if not isinstance(owner, SupportsLoadTarget):
                live = {"/".join((part, *path)): tensor for path, tensor in iter_tensors(owner.state_dict())}

            def empty(
                name: str, part: str = part, owner: Stateful = owner, live: Mapping[str, torch.Tensor] = live
            ) -> torch.Tensor:
                stored = metadata.state_dict_metadata[name]
                assert isinstance(stored, TensorStorageMetadata)
                self._targets[name] = allocate_target(part, owner, live, name, stored.size, stored.properties.dtype)
                return self._targets[name]

            self._states[part] = decode_state(structures[part], empty)

    def read_tensors(self, world: World) -> None:
        """Read the tensors; of sharded ones, each rank reads its shards."""
        if not self._targets:
            return
        reader = FileSystemReader(self._scratch)
        reader.fs = _FetchedFiles(self)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the missing process group
            load(self._targets, storage_reader=reader, process_group=world.control, no_dist=world.size == 1)

    def load_into(self, parts: Mapping[str, Stateful]) -> None:
        """Load the shared parts.

        Raises:
            CheckpointError: a part's `load_state_dict` failed; that error is the cause.
        """
        for part, owner in parts.items():
            _load_part(part, owner.load_state_dict, self._states[part])

    def load_rank_parts(self, rank_parts: Mapping[str, Stateful], ranks: Sequence[int]) -> list[str]:
        """Load the parts that belong to this rank; return the names of parts that were not saved.

        Args:
            rank_parts: the parts that belong to this rank.
            ranks: ranks whose states to load: this one, then, for parts that can merge states, those that are gone.
        """
        absent: list[str] = []
        for nth, rank in enumerate(ranks):
            wanted = {name: each for name, each in rank_parts.items() if nth == 0 or isinstance(each, Mergeable)}
            if not wanted:
                continue
            stored = torch.load(self._fetch(_rank_file(rank)), map_location="cpu", weights_only=True)
            for part, owner in wanted.items():
                if part in stored:
                    structure, tensors = stored[part]
                    take = owner.add_state_dict if nth and isinstance(owner, Mergeable) else owner.load_state_dict
                    _load_part(part, take, decode_state(structure, tensors.__getitem__))
            absent = absent or sorted(wanted.keys() - stored.keys())
        return absent

    def _fetch(self, file: str) -> Path:
        return self._storage.fetch(self._name, file, self._scratch)


class _FetchedFiles(FileSystem):
    """Opens the files of a checkpoint; remote files are fetched when first needed."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader

    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Any:
        return super().create_stream(self._reader._fetch(Path(path).name), mode)


def _load_part(part: str, take: Callable[[Any], object], state: Any) -> None:
    try:
        take(state)
    except Exception as error:
        raise CheckpointError(f"part {part!r} cannot load its state: {type(error).__name__}: {error}") from error


def capture_state(parts: Mapping[str, Stateful], rank_parts: Mapping[str, Stateful], world: World) -> dict[str, Any]:
    """Return a copy of the state on this rank, in host memory; of sharded tensors this rank's shards.

    Raises:
        CheckpointError: a state cannot be pickled.
    """
    snapshot = Snapshot.of(parts, rank_parts)
    return {
        "world_size": world.size,
        "rank": world.rank,
        "structures": {part: structure() for part, structure in snapshot.structures.items()},
        "layouts": {name: (tuple(tensor.shape), _sharding(tensor)) for name, tensor in snapshot.tensors.items()},
        "tensors": {name: to_local(tensor).to("cpu", copy=True) for name, tensor in snapshot.tensors.items()},
        "rank_parts": {part: (structure(), tensors) for part, (structure, tensors) in snapshot.rank_states.items()},
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
        if missing := sorted(parts.keys() - state["structures"].keys()):
            raise CheckpointError(f"it has no {', '.join(missing)}")
        for part, owner in parts.items():
            owner.load_state_dict(_decode_captured(state, part, owner))
        for part, owner in rank_parts.items():
            structure, tensors = state["rank_parts"][part]
            # Copies, because a part may change what it loads.
            copies = {name: tensor.clone() for name, tensor in tensors.items()}
            owner.load_state_dict(decode_state(structure, copies.__getitem__))
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

    return decode_state(state["structures"][part], filled)


def _sharding(tensor: torch.Tensor) -> str:
    """Describe how a tensor is divided among the ranks; empty if it is not."""
    if not isinstance(tensor, DTensor):
        return ""
    return f"sharded as {list(tensor.placements)} over {tuple(tensor.device_mesh.shape)} ranks"
