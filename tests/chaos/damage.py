"""Lists checkpoints on disk without Headway, and damages them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.schedule import Damage


@dataclass(frozen=True)
class Found:
    """A checkpoint on the disk, read without Headway."""

    folder: Path
    step: int
    sequence: int

    @property
    def identity(self) -> tuple[Path, int]:
        """Return an identity that differs for a later checkpoint of the same name, and ignores changes to its files."""
        return self.folder, self.folder.stat().st_ctime_ns


def checkpoints(run_dir: Path) -> list[Found]:
    """Return all checkpoints with a valid manifest, oldest first."""
    found = []
    for manifest in (run_dir / "checkpoints").glob("step-*/manifest.json"):
        try:
            said = json.loads(manifest.read_bytes())
            found.append(Found(manifest.parent, said["step"], said["sequence"]))
        except (ValueError, KeyError, TypeError):
            continue
    return sorted(found, key=lambda each: each.sequence)


def torn(run_dir: Path) -> int:
    """Return the number of incomplete saves and deletions."""
    folder = run_dir / "checkpoints"
    if not folder.exists():
        return 0
    hidden = [each for each in folder.iterdir() if each.name.startswith((".partial-", ".deleted-"))]
    return len(hidden) + sum(not (each / "manifest.json").exists() for each in folder.glob("step-*"))


def damage(checkpoint: Found, wound: Damage) -> str:
    """Damage one file of a checkpoint and return a description."""
    files = sorted(each for each in checkpoint.folder.iterdir() if each.is_file())
    file = files[int(wound.file * len(files))]
    before = file.read_bytes()
    place = int(wound.place * len(before))
    match wound.wound:
        case "delete":
            file.unlink()
        case "truncate":
            file.write_bytes(before[:place])
        case "append":
            file.write_bytes(before + b"\0")
        case "overwrite":
            # Of the same size, like a replaced file.
            file.write_bytes(bytes(255 - each for each in before))
        case "flip a bit":
            while _alike(file, before, after := _flipped(before, place, wound.bit)):
                place = (place + 1) % len(before)
            file.write_bytes(after)
    return f"{wound.wound}: {checkpoint.folder.name}/{file.name} at {place} of {len(before)} bytes"


def _flipped(before: bytes, place: int, bit: int) -> bytes:
    return before[:place] + bytes([before[place] ^ (1 << bit)]) + before[place + 1 :]


def _alike(file: Path, before: bytes, after: bytes) -> bool:
    """Return whether a flipped bit changes nothing, as from 1e-05 to 1E-05 in JSON."""
    if file.name != "manifest.json":
        return False
    try:
        return bool(json.loads(before) == json.loads(after))
    except ValueError:
        return False
