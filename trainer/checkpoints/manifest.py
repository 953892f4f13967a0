"""The manifest of a checkpoint, `manifest.json`; a directory without it is not a checkpoint. Imports no torch."""

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


class CheckpointWarning(UserWarning):
    """A checkpoint is damaged, lacks something optional, or could not be deleted; training continues."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint, as its manifest describes it.

    Attributes:
        path: directory or URI.
        step: completed optimizer updates.
        epoch: completed passes over the data.
        metrics: metrics at the save; floats, possibly NaN or infinite.
        meta: what the run stores besides its state; JSON.
        world_size: number of ranks that saved it.
        sequence: number of the save in its store. The newest checkpoint has the highest sequence, but not always the
            highest step, because a run may resume from an older checkpoint.
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
    """Return the text of a manifest, which includes a checksum of its content.

    Raises:
        CheckpointError: `metrics` are not floats, or `meta` is not JSON.
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
        raise CheckpointError(f"metrics must be floats and meta must be JSON: {error}") from error
    return text.encode()


def parse_manifest(path: str, text: bytes) -> tuple[Checkpoint, dict[str, FileChecksum]]:
    """Parse the text that `write_manifest` returned for the checkpoint at `path`.

    Raises:
        CheckpointError: the text is incomplete, altered or in another format.
    """
    try:
        body = json.loads(text)
        if body["format"] != FORMAT:
            raise CheckpointError(
                f"{path}/{MANIFEST} has format {body['format']}; this version of Headway reads format {FORMAT}"
            )
        if body.pop("crc32") != _body_sum(body):
            raise CheckpointError(f"{path}/{MANIFEST} has changed since it was written: its checksum differs")
        checkpoint = Checkpoint(
            path=path,
            step=body["step"],
            epoch=body["epoch"],
            metrics={name: float(_decode(value)) for name, value in body["metrics"].items()},
            meta=_decode(body["meta"]),
            world_size=body["world_size"],
            sequence=body["sequence"],
            time_s=body["time_s"],
            writer=body["writer"],
        )
        return checkpoint, {name: FileChecksum(*each) for name, each in body["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}/{MANIFEST} is incomplete or altered ({type(error).__name__}: {error})"
        ) from error


def _body_sum(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def _encode(value: Any) -> Any:
    """Return a value as JSON, which has neither NaN nor infinities."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(float(value))}
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"keys must be text, got {wrong[0]!r}")
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
