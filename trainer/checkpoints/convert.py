"""Convert checkpoints of format 3, which held pickles, to the present format. Only this module reads them."""

from __future__ import annotations

import io
import json
import pickle
import tempfile
import uuid
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from ..errors import CheckpointError, ConfigError
from .format.file_checksums import FileChecksum
from .format.manifest import MANIFEST, Checkpoint, decode_floats, parse_manifest, write_manifest
from .format.plain_values import encode_state
from .retention import is_kept, mark_kept
from .scan import verify_file
from .snapshot import Layout, Shard, Snapshot
from .storage import Storage

_FORMAT = 3


def is_convertible(storage: Storage, name: str) -> bool:
    """Whether this is a checkpoint of format 3."""
    try:
        return bool(json.loads(storage.read(name, MANIFEST))["format"] == _FORMAT)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def convert_checkpoint(storage: Storage, name: str, *, trust_pickle: bool) -> str:
    """Replace a checkpoint of format 3 by one of the present format with the same state, and return its name.

    The new one is committed under another name, and read back, before the old one is deleted.

    Args:
        storage: storage of the checkpoint.
        name: its name there.
        trust_pickle: reads the pickles in it, which can run any code.

    Raises:
        ConfigError: `trust_pickle` is False.
        CheckpointError: the checkpoint is damaged, or of another format, or has state that this format cannot have.
    """
    if not trust_pickle:
        raise ConfigError(
            f"{storage.path_of(name)} holds pickles, which can run any code when they are read: pass --trust-pickle if "
            "you know who wrote it"
        )
    with tempfile.TemporaryDirectory(prefix="headway-convert-") as scratch:
        body = _read_manifest(storage, name)
        folder = _fetch_all(storage, name, body["files"], Path(scratch))
        ranks = _read_ranks(folder, body["world_size"])
        shared = _read_shared(folder)
        new = _free_name(storage, name)
        staged = storage.stage(f"{new}-{uuid.uuid4().hex[:8]}")
        try:
            files = _write(staged, shared, ranks)
            storage.publish(staged, new, sorted(files))
            facts = _facts(storage.path_of(new), body)
            storage.commit(staged, new, write_manifest(facts, files), files)
        except BaseException:
            storage.abandon(staged, new)
            raise
    _, files = parse_manifest(storage.path_of(new), storage.read(new, MANIFEST))
    if problems := [problem for file in files if (problem := verify_file(storage, new, file, files[file]))]:
        raise CheckpointError(f"{storage.path_of(new)} cannot be read back: {'; '.join(problems)}")
    if is_kept(storage, name):
        mark_kept(storage, new)
    storage.remove(name)
    return new


def _read_manifest(storage: Storage, name: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(storage.read(name, MANIFEST))
    if body.get("format") != _FORMAT:
        raise CheckpointError(f"{storage.path_of(name)} has format {body.get('format')}, and not {_FORMAT}")
    crc32 = body.pop("crc32")
    if crc32 != zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()):
        raise CheckpointError(f"{storage.path_of(name)}/{MANIFEST} has changed since it was written")
    return body


def _fetch_all(storage: Storage, name: str, files: Mapping[str, Any], scratch: Path) -> Path:
    folder = scratch
    for file, (size, checksum) in files.items():
        if problem := verify_file(storage, name, file, FileChecksum(size, checksum)):
            raise CheckpointError(f"{storage.path_of(name)} is damaged: {problem}")
        folder = storage.fetch(name, file, scratch).parent
    return folder


def _read_shared(folder: Path) -> dict[str, Any]:
    """Return the state of the shared parts, with full tensors."""
    reader = FileSystemReader(folder)
    described = reader.read_metadata().state_dict_metadata
    tensors: dict[str, Any] = {
        name: torch.empty(each.size, dtype=each.properties.dtype)
        for name, each in described.items()
        if isinstance(each, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the missing process group
        if tensors:
            load(tensors, storage_reader=reader, no_dist=True)
    structures: dict[str, bytes] = pickle.loads((folder / "parts.pkl").read_bytes())
    # The format did not record what a run had unfrozen.
    modes: dict[str, Any] = {"trains": {}, "training": {}}
    return {"modes": modes, **{part: _unpickle(structure, tensors) for part, structure in structures.items()}}


def _read_ranks(folder: Path, world_size: int) -> list[dict[str, Any]]:
    """Return the state of the parts of each rank."""
    ranks = []
    for rank in range(world_size):
        stored = torch.load(folder / f"rank-{rank:05d}.pt", map_location="cpu", weights_only=True)
        ranks.append({part: _unpickle(structure, tensors) for part, (structure, tensors) in stored.items()})
    return ranks


def _unpickle(structure: bytes, tensors: Mapping[str, torch.Tensor]) -> Any:
    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: str) -> torch.Tensor:
            return tensors[pid]

    return Unpickler(io.BytesIO(structure)).load()


def _write(folder: Path, shared: Mapping[str, Any], ranks: list[dict[str, Any]]) -> dict[str, FileChecksum]:
    """Write everything; the file of rank 0 has all shared tensors."""
    parts: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    for part, state in shared.items():
        parts[part], named = encode_state(part, state)
        tensors |= named
    files: dict[str, FileChecksum] = {}
    for rank, states in enumerate(ranks):
        rank_parts: dict[str, Any] = {}
        own: dict[str, torch.Tensor] = {}
        for part, state in states.items():
            rank_parts[part], named = encode_state(part, state)
            own |= named
        here = tensors if rank == 0 else {}
        shards = {
            name: Shard(0, each.dtype, tuple(each.shape), (0,) * each.dim(), tuple(each.shape))
            for name, each in here.items()
        }
        snapshot = Snapshot(parts, rank_parts, Layout([], {}, shards), here, own)
        files |= snapshot.write(folder, rank)
    return files


def _facts(path: str, body: Mapping[str, Any]) -> Checkpoint:
    meta = decode_floats(body["meta"])
    certificate = {key: value for key, value in meta.get("certificate", {}).items() if key not in ("tensors", "ranks")}
    return Checkpoint(
        path=path,
        step=body["step"],
        epoch=body["epoch"],
        metrics={name: float(decode_floats(value)) for name, value in body["metrics"].items()},
        meta={**meta, "certificate": certificate} if "certificate" in meta else meta,
        world_size=body["world_size"],
        sequence=body["sequence"],
        time_s=body["time_s"],
        writer=f"{body['writer']}, converted from format {_FORMAT}",
    )


def _free_name(storage: Storage, name: str) -> str:
    taken, count = set(storage.names()), 2
    while f"{name}.{count}" in taken:
        count += 1
    return f"{name}.{count}"
