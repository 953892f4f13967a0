"""Write images as files, and convert them to arrays for other trackers."""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ..errors import ConfigError
from .base import RunInfo, Tracker

if TYPE_CHECKING:
    import numpy as np
    import torch

_COLOR_TYPE = {
    1: 0,
    2: 4,
    3: 2,
    4: 6,
}  # PNG color type by number of channels: gray, gray + alpha, RGB, RGBA


def as_tensor(image: Any) -> Any:
    """Return a PIL image as a tensor uint8 [channels, height, width]: gray, or RGB; anything else as it is."""
    if not hasattr(image, "convert"):
        return image
    import numpy as np
    import torch

    pixels = torch.from_numpy(np.array(image.convert("L" if image.mode in ("1", "L") else "RGB")))
    return pixels[None] if pixels.dim() == 2 else pixels.permute(2, 0, 1)


class ImageFilesTracker(Tracker):
    """Writes images as PNG files: `images/step-00000050/<name>.png` in the run directory.

    A run that resumes after step 50, or rolls back to it, deletes the images of later steps; a new run deletes all. A
    slash in a name creates a folder.

    Args:
        limit: number of images stored per step; later ones are dropped.
        path: folder or fsspec URI; by default `images` in the run directory; without either nothing is written.

    Raises:
        ConfigError: `limit` is below 1.

    Example:
        >>> Digits(config, run_dir="runs/pictures", trackers=[ImageFilesTracker(limit=4)]).fit().status
        'completed'
    """

    def __init__(self, limit: int = 8, path: str | os.PathLike[str] | None = None) -> None:
        if limit < 1:
            raise ConfigError(f"limit must be >= 1, got {limit}; to store no images, leave the tracker out")
        self._limit = limit
        self._path = None if path is None else os.fspath(path)
        self._fs: Any = None
        self._folder = ""
        self._step = self._stored = 0

    def start(self, run: RunInfo, *, step: int) -> None:
        """Open the folder and delete the images that this attempt will write again."""
        path = self._path or (run.run_dir and f"{run.run_dir.rstrip('/')}/images")
        if path:
            from fsspec.core import url_to_fs

            self._fs, self._folder = url_to_fs(path)
            self.rewind(step if run.resumed else -1)

    def log_images(self, images: Mapping[str, torch.Tensor], *, step: int) -> None:
        """Write the first images of a step."""
        if self._fs is None:
            return
        if step != self._step:
            self._step, self._stored = step, 0
        for name, image_CHW in list(images.items())[: self._limit - self._stored]:
            parts = [quote(part, safe=" ") for part in name.split("/") if part not in ("", ".", "..")]
            file = "/".join((self._folder, f"step-{step:08d}", *parts)) + ".png"
            self._fs.makedirs(self._fs._parent(file), exist_ok=True)
            self._fs.pipe_file(file, encode_png(pixels_HWC(image_CHW)))
            self._stored += 1

    def rewind(self, step: int) -> None:
        """Delete the images of later steps."""
        if self._fs is None or not self._fs.exists(self._folder):
            return
        for path in self._fs.ls(self._folder, detail=False):
            found = re.fullmatch(r"step-(\d{8,})", str(path).rstrip("/").rsplit("/", 1)[-1])
            if found and int(found[1]) > step:
                self._fs.rm(path, recursive=True)
        self._stored = 0


def pixels_HWC(image_CHW: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return an image as uint8 of shape [height, width, channels], on the CPU.

    Args:
        image_CHW: integers from 0 to 255, or floats from 0 to 1.

    Raises:
        ValueError: the image does not have 3 dimensions and 1 to 4 channels.
    """
    if image_CHW.dim() != 3 or image_CHW.shape[0] not in _COLOR_TYPE:
        raise ValueError(
            f"an image must have shape [channels, height, width] with 1 to 4 channels, got {list(image_CHW.shape)}"
        )
    pixels = image_CHW.detach().cpu()
    if pixels.is_floating_point():
        pixels = (pixels.float().clamp(0, 1) * 255).round()
    return pixels.byte().permute(1, 2, 0).numpy()


def encode_png(pixels: np.ndarray[Any, Any]) -> bytes:
    """Return pixels, uint8 of shape [height, width, channels], as a PNG file.

    Source: https://www.w3.org/TR/png-3/; every row is stored unfiltered.
    """
    height, width, channels = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOR_TYPE[channels], 0, 0, 0)
    rows = b"".join(b"\x00" + pixels[row].tobytes() for row in range(height))
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
