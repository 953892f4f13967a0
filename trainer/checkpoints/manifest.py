"""What a checkpoint says of itself: `manifest.json`, without which a directory is no checkpoint. Knows no torch."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError
from .file_checksums import FileChecksum

MANIFEST = "manifest.json"
FORMAT = 3
# In 1 the checksums of files are CRC-32, as numbers; up to 2 the sums of tensors are of other numbers (digests.py).
_READABLE = (1, 2, FORMAT)


class CheckpointWarning(UserWarning):
    """A checkpoint is damaged, lacks something that can be done without, or could not be deleted; the run goes on."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint, as its manifest describes it.

    Attributes:
        path: directory or URI.
        step: completed optimizer updates.
        epoch: completed passes over the data.
        metrics: what was known when it was saved; any float, NaN and infinities too.
        meta: what the run wanted to remember beside the state; JSON.
        world_size: how many ranks saved it.
        sequence: counts the saves into one store. The newest checkpoint is the one saved last, which is not always the
            one with the most steps: a run may go on from an older one.
        time_s: when it was committed, in seconds since 1970.
        writer: the process that committed it.
    """

    path: str
    step: int
    epoch: int
    metrics: dict[str, float]
    meta: dict[str, Any]
    world_size: int
    sequence: int
    time_s: float
    writer: str = ""


def write_manifest(checkpoint: Checkpoint, files: Mapping[str, FileChecksum]) -> bytes:
    """Returns the text of a manifest, itself protected by a checksum.

    Raises:
        CheckpointError: `meta` holds something that JSON cannot.
    """
    try:
        body = {
            "format": FORMAT,
            "step": checkpoint.step,
            "epoch": checkpoint.epoch,
            "sequence": checkpoint.sequence,
            "time_s": checkpoint.time_s,
            "world_size": checkpoint.world_size,
            "writer": checkpoint.writer,
            "metrics": {name: _encode(float(value)) for name, value in checkpoint.metrics.items()},
            "meta": _encode(checkpoint.meta),
            "files": {name: [each.size_bytes, each.checksum] for name, each in sorted(files.items())},
        }
        text = json.dumps(body | {"crc32": _body_sum(body)}, indent=1, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"metrics and meta of a checkpoint are floats and JSON: {error}") from error
    return text.encode()


def parse_manifest(path: str, text: bytes) -> tuple[Checkpoint, dict[str, FileChecksum]]:
    """Reads what `write_manifest` wrote for the checkpoint at `path`.

    Raises:
        CheckpointError: the text is torn, altered, or of a later format.
    """
    try:
        body = json.loads(text)
        if body["format"] not in _READABLE:
            raise CheckpointError(
                f"{path}/{MANIFEST} has format {body['format']}; this version of Headway reads up to {FORMAT}"
            )
        if body.pop("crc32") != _body_sum(body):
            raise CheckpointError(f"{path}/{MANIFEST} is not what was written: its checksum differs")
        checkpoint = Checkpoint(
            path=path,
            step=body["step"],
            epoch=body["epoch"],
            metrics={name: float(_decode(value)) for name, value in body["metrics"].items()},
            meta=_decode(body["meta"]),
            world_size=body["world_size"],
            sequence=body["sequence"],
            time_s=body["time_s"],
            writer=body.get("writer", ""),
        )
        files: dict[str, list[Any]] = body["files"]
        if body["format"] == 1:
            files = {name: [size, f"crc32:{crc:08x}"] for name, (size, crc) in files.items()}
        return checkpoint, {name: FileChecksum(*each) for name, each in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}/{MANIFEST} is torn or altered ({type(error).__name__}: {error})") from error


def _body_sum(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def _encode(value: Any) -> Any:
    """JSON has no NaN and no infinities."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(float(value))}
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"keys are text, not {wrong[0]!r}")
        return {key: _encode(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(each) for each in value]
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        return (
            float(value["$float"])
            if value.keys() == {"$float"}
            else {key: _decode(each) for key, each in value.items()}
        )
    if isinstance(value, list):
        return [_decode(each) for each in value]
    return value
