"""Images of any size become rows of one size: the same bytes on any number of tasks, and damaged ones are named."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageOps

from headway.datasets.errors import DataError
from headway.datasets.formats.images import Images
from headway.datasets.formats.webdataset import WebDataset
from headway.datasets.prepare import prepare_images
from headway.datasets.show import describe
from headway.datasets.sources import Parquet
from headway.datasets.stream import Stream
from tests.datasets.prepare.test_job import bytes_of

from ..conftest import shard_info


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Forty pictures of noise in two classes, of different sizes."""
    random = np.random.default_rng(0)
    folder = tmp_path / "photos"
    for number in range(40):
        path = folder / ("cat" if number % 2 else "dog") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (20 + number % 7, 30 - number % 5, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return folder


def encoded(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="png")
    return file.getvalue()


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def rows_of(folder: str | Path) -> dict[str, list[Any]]:
    return pq.read_table(folder).to_pydict()


def pixels_of(folder: str | Path, column: str = "image") -> np.ndarray[Any, Any]:
    """As docs/data.md says that other readers get them."""
    table = pq.read_table(folder)
    shape = json.loads(table.schema.field(column).metadata[b"headway.shape"])
    return np.array([np.frombuffer(row, np.uint8).reshape(shape) for row in table[column].to_pylist()])


def test_pixels_and_labels_are_those_of_pillow_and_of_the_folders(photos: Path, tmp_path: Path) -> None:
    done = prepare_images(photos, tmp_path / "out", size=(8, 12), rows_per_group=4, rows_per_file=16)
    assert (done.rows, done.files, done.skipped_rows) == (40, 3, 0)
    source = Images(photos).open()
    rows = rows_of(done.path)
    for number, (name, label) in enumerate(zip(source.names, source.labels, strict=True)):
        with Image.open(photos / name) as image:
            expected = np.asarray(ImageOps.fit(image, (12, 8), method=Image.Resampling.BICUBIC))
        np.testing.assert_array_equal(pixels_of(done.path)[number], expected)
        assert rows["label"][number] == label
    fragment = Parquet(done.path).open().fragment(0).read()
    assert fragment["image"].shape == (4, 8, 12, 3)
    assert fragment["image"].dtype == np.uint8
    shown = describe(done.path)
    assert shown.columns == {"image": "uint8[8, 12, 3]", "label": "int64"}
    assert shown.first_row["image"] == fragment["image"][0].tolist()
    stream = Stream(Parquet(done.path))
    stream.setup(shard_info(0, 1))
    batch = next(iter(stream.epoch(0, offset=0)))
    stream.close()
    assert batch.micro_batches[0]["image"].shape[1:] == (8, 12, 3)


def test_encoded_images_and_grey(photos: Path, tmp_path: Path) -> None:
    jpeg = prepare_images(photos, tmp_path / "jpeg", size=16, encoding="jpeg", quality=95)
    sizes = {Image.open(io.BytesIO(each)).size for each in rows_of(jpeg.path)["image"]}
    assert sizes == {(16, 16)}
    grey = prepare_images(photos, tmp_path / "grey", size=16, mode="L")
    assert pixels_of(grey.path).shape == (40, 16, 16)


def test_other_formats_keep_their_columns(tmp_path: Path) -> None:
    pixels = np.arange(5 * 6 * 3, dtype=np.uint8).reshape(5, 6, 3)
    members = {"png": encoded(pixels), "cls": b"3", "txt": b"words"}
    write_tar(tmp_path / "a.tar", {f"{row}.{kind}": content for row in range(3) for kind, content in members.items()})
    data = WebDataset(str(tmp_path / "a.tar"), columns=["png", "cls", "txt"])
    done = prepare_images(data, tmp_path / "out", size=(5, 6), image="png")
    rows = rows_of(done.path)
    np.testing.assert_array_equal(pixels_of(done.path, "png")[1], pixels)
    assert rows["cls"] == [3, 3, 3]
    assert rows["txt"] == ["words"] * 3
    # As in Hugging Face's datasets.
    table = pa.table({"image": [{"bytes": encoded(pixels), "path": None}], "boxes": [[1, 2]]})
    pq.write_table(table, tmp_path / "hub.parquet")
    with pytest.raises(DataError, match="column 'boxes' of .* has neither a number nor text nor bytes in each row"):
        prepare_images(Parquet(tmp_path / "hub.parquet"), tmp_path / "hub", size=4)
    hub = prepare_images(Parquet(tmp_path / "hub.parquet", columns=["image"]), tmp_path / "hub", size=(5, 6))
    np.testing.assert_array_equal(pixels_of(hub.path)[0], pixels)


@pytest.mark.parametrize("on_bad_row", ["raise", "skip"])
def test_images_of_more_than_eight_bits_are_refused(tmp_path: Path, on_bad_row: Any) -> None:
    write_tar(tmp_path / "a.tar", {"0.png": encoded(np.full((4, 6), 40_000, np.uint16))})
    with pytest.raises(DataError, match=r"0 in .*a.tar has the Pillow mode 'I;16', and would be clipped"):
        prepare_images(
            WebDataset(str(tmp_path / "a.tar")), tmp_path / "out", size=4, image="png", on_bad_row=on_bad_row
        )


def test_damaged_images_are_named_or_left_out_and_counted(photos: Path, tmp_path: Path) -> None:
    good = encoded(np.zeros((4, 4, 3), np.uint8))
    pq.write_table(pa.table({"image": [good, b"no image", good]}), tmp_path / "rows.parquet")
    data = Parquet(tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"row 1 of row group 0 of .*rows.parquet cannot be decoded: UnidentifiedImage"):
        prepare_images(data, tmp_path / "out", size=4)
    done = prepare_images(data, tmp_path / "skipped", size=4, on_bad_row="skip")
    assert (done.rows, done.skipped_rows) == (2, 1)
    (photos / "cat" / "1.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"cat/1.png in .* is not an image"):
        prepare_images(photos, tmp_path / "photos-out", size=4)
    done = prepare_images(photos, tmp_path / "photos-skipped", size=4, on_bad_row="skip")
    assert (done.rows, done.skipped_rows) == (39, 1)


@pytest.mark.extended
@pytest.mark.usefixtures("ray_session")
def test_any_number_of_tasks_gives_the_same_bytes(photos: Path, tmp_path: Path) -> None:
    made = [prepare_images(photos, tmp_path / str(tasks), size=8, rows_per_file=16, tasks=tasks) for tasks in (1, 2)]
    assert made[0].digest == made[1].digest
    assert bytes_of(made[0].path) == bytes_of(made[1].path)


def test_an_interruption_keeps_finished_files_and_another_size_is_refused(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_: object) -> None:
        if len(os.listdir(tmp_path / "out.partial" / ".parts")) >= 2:
            raise KeyboardInterrupt

    options: dict[str, Any] = {"size": 8, "rows_per_file": 16}
    monkeypatch.setattr("headway.datasets.prepare.job._SHOWN_EVERY_S", 0)
    with pytest.raises(KeyboardInterrupt):
        prepare_images(photos, tmp_path / "out", progress=stop, **options)
    kept = tmp_path / "out.partial" / "part-00000.parquet"
    before = kept.stat().st_mtime_ns
    with pytest.raises(DataError, match=r"size was \[8, 8\] and is \[9, 9\]"):
        prepare_images(photos, tmp_path / "out", size=9, rows_per_file=16)
    done = prepare_images(photos, tmp_path / "out", **options)
    assert Path(done.path, kept.name).stat().st_mtime_ns == before
    assert done.digest == prepare_images(photos, tmp_path / "whole", **options).digest


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "size must be >= 1, got 0"),
        ({"size": 8, "encoding": "gif"}, "encoding must be 'raw', 'jpeg' or 'png', got 'gif'"),
        ({"size": 8, "encoding": "jpeg", "quality": 99}, "quality must be from 1 to 95, got 99"),
        ({"size": 8, "mode": "RGBA"}, "mode must be 'RGB' or 'L', got 'RGBA'"),
        ({"size": 8, "rows_per_file": 0}, "rows_per_file must be >= 1, got 0"),
        ({"size": 8, "on_bad_row": "drop"}, "on_bad_row must be 'raise' or 'skip', got 'drop'"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_written(
    photos: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        prepare_images(photos, tmp_path / "out", **options)
    assert not (tmp_path / "out.partial").exists()
