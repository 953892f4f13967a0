"""The manifest of a checkpoint, `manifest.json`; a directory without it is not a checkpoint. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import CheckpointError
from .file_checksums import FileChecksum
from .strict_json import parse_json

MANIFEST = "manifest.json"
FORMAT = 5
# Names of files in the folder of the checkpoint, and of nothing outside of it.
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


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
        digest: SHA-256 of the manifest's content.
        previous: name and digest of the checkpoint that was committed before it in its store; None if it is the first.
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
    digest: str = ""
    previous: tuple[str, str] | None = None


def write_manifest(checkpoint: Checkpoint, files: Mapping[str, FileChecksum]) -> bytes:
    """Return the text of a manifest, which includes a digest of its content.

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
            "previous": None if checkpoint.previous is None else list(checkpoint.previous),
            "metrics": {name: _encode(float(value)) for name, value in checkpoint.metrics.items()},
            "meta": _encode(checkpoint.meta),
            "files": {name: [each.size_bytes, each.checksum] for name, each in sorted(files.items())},
        }
        text = json.dumps(body | {"digest": _digest(body)}, indent=1, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"metrics must be floats and meta must be JSON: {error}") from error
    return text.encode()


def parse_manifest(path: str, text: bytes) -> tuple[Checkpoint, dict[str, FileChecksum]]:
    """Parse the text that `write_manifest` returned for the checkpoint at `path`.

    Raises:
        CheckpointError: the text is incomplete, altered or in another format.
    """
    where = f"{path}/{MANIFEST}"
    body = parse_json(text, where)
    try:
        if body["format"] != FORMAT:
            how = ": convert it with `headway checkpoints convert`" if body["format"] == 3 else ""
            raise CheckpointError(f"{where} has format {body['format']}; this version reads format {FORMAT}{how}")
        digest = body.pop("digest")
        if digest != _digest(body):
            raise CheckpointError(f"{where} has changed since it was written: its digest differs")
        if wrong := [name for name in body["files"] if not _FILE_NAME.fullmatch(name)]:
            raise CheckpointError(f"{where} names the file {wrong[0]!r}, which is not the name of a file in its folder")
        previous = body["previous"]
        checkpoint = Checkpoint(
            path=path,
            step=_whole(body["step"]),
            epoch=_whole(body["epoch"]),
            metrics={name: float(decode_floats(value)) for name, value in body["metrics"].items()},
            meta=decode_floats(body["meta"]),
            world_size=_whole(body["world_size"]),
            sequence=_whole(body["sequence"]),
            time_s=float(body["time_s"]),
            writer=str(body["writer"]),
            digest=digest,
            previous=None if previous is None else (str(previous[0]), str(previous[1])),
        )
        return checkpoint, {name: FileChecksum(_whole(size), sum) for name, (size, sum) in body["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise CheckpointError(f"{where} is incomplete or altered ({type(error).__name__}: {error})") from error


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"expected an integer >= 0, got {value!r}")
    return value


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


def decode_floats(value: Any) -> Any:
    """Return JSON of a manifest with its floats that JSON does not have."""
    if isinstance(value, dict):
        return (
            float(value["$float"])
            if value.keys() == {"$float"}
            else {key: decode_floats(each) for key, each in value.items()}
        )
    if isinstance(value, list):
        return [decode_floats(each) for each in value]
    return value
