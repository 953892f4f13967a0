"""Decodes and resizes images into Parquet, once, before training."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..arrow import NUMBERS, shaped_bytes
from ..errors import DataError
from ..formats.base import DataFormat, Fragment, OnBadRow, check_options
from ..formats.images import Images, check_pillow, is_clipped
from ..paths import PathLike, nearest
from .job import Prepared, PrepareProgress, Tables, check_tasks, prepare
from .pieces import place_of

Encoding = Literal["raw", "jpeg", "png"]
_CHANNELS = {"RGB": 3, "L": 1}


def prepare_images(
    images: PathLike | DataFormat,
    output: PathLike,
    *,
    size: int | tuple[int, int],
    encoding: Encoding = "raw",
    quality: int = 90,
    mode: Literal["RGB", "L"] = "RGB",
    image: str = "image",
    on_bad_row: OnBadRow = "raise",
    rows_per_group: int = 64,
    rows_per_file: int = 2048,
    tasks: int | None = 1,
    progress: Callable[[PrepareProgress], None] | None = None,
) -> Prepared:
    """Convert images of any size to Parquet files of images of one size. Needs Pillow.

    An image is scaled by bicubic interpolation until it covers `size`, and what is too much is cut off on both sides
    alike. Labels and other columns are kept. After an interruption, the same call verifies the finished files by their
    checksums, and makes the others.

    Args:
        images: a folder for `Images`, or any format with a column of images: arrays, encoded bytes, or dicts with
            `bytes`, as in Hugging Face's datasets.
        output: as for `prepare_text`.
        size: (height, width) of the result; one number for both.
        encoding: "raw" stores pixels, which a stream reads without decoding as uint8 [H, W, 3] or [H, W]. Other readers
            get their bytes in C order, and the shape as `headway.shape` in the metadata of the column. "jpeg" and "png"
            store encoded bytes, which take less space and are decoded in a transform.
        quality: of JPEG, 1 to 95.
        mode: "RGB", or "L" for grey.
        image: the column with the images, in the input and the output.
        on_bad_row: an image that cannot be decoded is an error that names it ("raise") or is left out ("skip") and
            counted in `Prepared.skipped_rows`. `Images` has its own option of this name, which is used instead.
        rows_per_group: images per row group, the unit that a stream reads and shuffles.
        rows_per_file: images per Parquet file, about.
        tasks: as for `prepare_text`.
        progress: as for `prepare_text`.

    Raises:
        DataError: there is no input or it is damaged, an option is invalid, or `output` was created from other inputs
            or options.
    """
    check_tasks(tasks)
    height, width = (size, size) if isinstance(size, int) else size
    numbers = {"size": min(height, width), "rows_per_group": rows_per_group, "rows_per_file": rows_per_file}
    for name, value in numbers.items():
        if value < 1:
            raise DataError(f"{name} must be >= 1, got {value}")
    if encoding not in get_args(Encoding):
        raise DataError(f"encoding must be 'raw', 'jpeg' or 'png', got {encoding!r}")
    if not 1 <= quality <= 95:
        raise DataError(f"quality must be from 1 to 95, got {quality}")
    if isinstance(images, (str, os.PathLike)):
        images = Images(images, mode=mode, on_bad_row=on_bad_row)
    if isinstance(images, Images):
        mode, on_bad_row = images.mode, images.on_bad_row  # type: ignore[assignment]
    if mode not in _CHANNELS:
        raise DataError(f"mode must be 'RGB' or 'L', got {mode!r}")
    check_options(None, on_bad_row)
    check_pillow()
    source = images.open()
    kept = _other_columns(source.fragment(0), image, images)
    convert = _Resize(
        (height, width), encoding, quality, mode, image, tuple(kept.items()), on_bad_row, rows_per_group,
        source.skipped_rows,
    )  # fmt: skip
    wanted = {
        "size": [height, width],
        "encoding": f"jpeg, quality {quality}" if encoding == "jpeg" else encoding,
        "mode": mode,
        "image": image,
        "columns": {name: str(kind) for name, kind in kept.items()},
        "on_bad_row": on_bad_row,
        "rows_per_group": rows_per_group,
        "rows_per_file": rows_per_file,
        "inputs": f"{source.rows} rows, {source.fingerprint}",
    }
    parts: list[list[Fragment]] = [[]]
    rows = 0
    for index, count in enumerate(source.fragment_rows.tolist()):
        if rows >= rows_per_file:
            parts.append([])
            rows = 0
        parts[-1].append(source.fragment(index))
        rows += count
    return prepare(parts, convert, output, wanted, tasks=tasks, progress=progress)


@dataclass(frozen=True)
class _Resize:
    """Converts fragments to tables of images of one size."""

    size: tuple[int, int]
    encoding: Encoding
    quality: int
    mode: str
    image: str
    kept: tuple[tuple[str, pa.DataType], ...]
    on_bad_row: OnBadRow
    rows_per_group: int
    left_out: int

    @property
    def compression(self) -> str:
        """Of the Parquet files: pixels hardly get smaller, and encoded images do not."""
        return "none"

    def tables(self, part: Sequence[Fragment]) -> Tables:
        """Yield the row groups of one part."""
        waiting: list[tuple[Any, ...]] = []
        skipped = 0
        for fragment in part:
            for row in self._rows(fragment):
                if row is None:
                    skipped += 1
                    continue
                waiting.append(row)
                if len(waiting) == self.rows_per_group:
                    yield self._table(waiting)
                    waiting = []
        if waiting:
            yield self._table(waiting)
        return {"skipped": skipped}

    def last(self, records: Sequence[Mapping[str, Any]]) -> Tables:
        """Check that there are images; nothing is left over."""
        if not any(each["rows"] for each in records):
            raise DataError("the input has no image that can be decoded")
        yield from ()
        return {"skipped": self.left_out}

    def _rows(self, fragment: Fragment) -> Iterator[tuple[Any, ...] | None]:
        """Yield the image and the other columns of each row; None for a row that is to be left out."""
        rows = fragment.read()
        others = [rows[name] for name, _ in self.kept]
        for row, value in enumerate(rows[self.image]):
            try:
                image = self._resized(value)
            except DataError as error:
                raise DataError(f"{place_of(fragment, row)} {error}") from error
            except Exception as error:  # Pillow's plugins raise many types
                if self.on_bad_row == "raise":
                    raise DataError(
                        f"{place_of(fragment, row)} cannot be decoded: {type(error).__name__}: {error}. Mend it, or "
                        "leave such images out with on_bad_row='skip'"
                    ) from error
                yield None
            else:
                yield image, *(each[row] for each in others)

    def _resized(self, value: Any) -> npt.NDArray[np.uint8] | bytes:
        from PIL import Image, ImageOps

        if isinstance(value, Mapping):
            value = value["bytes"]
        opened = Image.open(io.BytesIO(value)) if isinstance(value, bytes) else Image.fromarray(value)
        with opened:
            if is_clipped(opened.mode, self.mode):
                raise DataError(
                    f"has the Pillow mode {opened.mode!r}, and would be clipped: convert it to 8 bits first"
                )
            height, width = self.size
            image = ImageOps.fit(opened.convert(self.mode), (width, height), method=Image.Resampling.BICUBIC)
        if self.encoding == "raw":
            return np.asarray(image)
        encoded = io.BytesIO()
        image.save(encoded, format=self.encoding, **({"quality": self.quality} if self.encoding == "jpeg" else {}))
        return encoded.getvalue()

    def _table(self, rows: Sequence[tuple[Any, ...]]) -> pa.Table:
        images, *others = zip(*rows, strict=True)
        if self.encoding == "raw":
            first, pixels = shaped_bytes(self.image, np.stack(images))
        else:
            first, pixels = pa.field(self.image, pa.binary()), pa.array(images, pa.binary())
        columns, fields = [pixels], [first]
        for (name, kind), values in zip(self.kept, others, strict=True):
            try:
                columns.append(pa.array(values, kind))
            except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
                raise DataError(
                    f"column {name!r} has a value that is not {kind}, as the first one is: {error}"
                ) from error
            fields.append(pa.field(name, kind))
        return pa.table(columns, schema=pa.schema(fields))


def _other_columns(fragment: Fragment, image: str, origin: object) -> dict[str, pa.DataType]:
    """Return the types of the columns besides the images.

    Raises:
        DataError: there is no such column, or another one holds neither numbers nor text nor bytes.
    """
    rows = fragment.read()
    if image not in rows:
        raise DataError(f"{origin} has no column {image!r}; {nearest(image, list(rows))}: set image=")
    kinds: dict[str, pa.DataType] = {}
    for name, values in rows.items():
        if name == image:
            continue
        if values.dtype.kind in NUMBERS and values.ndim == 1:
            kinds[name] = pa.from_numpy_dtype(values.dtype)
        elif all(isinstance(value, str) for value in values):
            kinds[name] = pa.string()
        elif all(isinstance(value, bytes) for value in values):
            kinds[name] = pa.binary()
        else:
            raise DataError(
                f"column {name!r} of {origin} has neither a number nor text nor bytes in each row: name the columns to "
                "keep by columns= of the format"
            )
    return kinds
