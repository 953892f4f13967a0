"""Images in folders: labels, every image once in any order, damage, and the index."""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.implementations.zip import ZipFileSystem
from PIL import Image

from headway.datasets.batching import memory_limits
from headway.datasets.errors import DataError
from headway.datasets.formats import images
from headway.datasets.formats.images import Images
from headway.datasets.mixture import Mixture
from headway.datasets.row_groups import read
from headway.datasets.stream import Stream

from .conftest import RAY_IF_EXTENDED, shard_info

CLASSES = ("ant", "bee", "cat")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """90 PNG images of 6 x 4 pixels in three classes; every pixel of an image is its number."""
    for number in range(90):
        path = tmp_path / "photos" / CLASSES[number // 30] / ("deep" if number % 2 else "") / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 6, 3), number, np.uint8)).save(path)
    return tmp_path / "photos"


def batches(data: Any, *, rank: int = 0, world_size: int = 1, offset: int = 0, **options: Any) -> Any:
    stream = Stream(data, **{"engine": "threads", "tail": "keep", **options})
    stream.setup(shard_info(rank, world_size))
    try:
        return list(stream.epoch(0, offset=offset))
    finally:
        stream.close()


def numbers(data: Any, *, world_size: int = 1, **options: Any) -> list[list[int]]:
    """Return the numbers of the images of each global batch, by rank."""
    ranks = [batches(data, rank=rank, world_size=world_size, **options) for rank in range(world_size)]
    return [
        [int(image[0, 0, 0]) for batch in step for image in batch.micro_batches[0]["image"]]
        for step in zip(*ranks, strict=True)
    ]


@pytest.mark.parametrize("on_bad_row", ["raise", "skip"])
def test_values_of_more_than_eight_bits_are_not_clipped(folder: Path, on_bad_row: Any) -> None:
    Image.fromarray(np.full((4, 6), 40_000, np.uint16)).save(folder / "bee" / "depth.png")
    with pytest.raises(
        DataError, match=r"bee/depth.png in .* has the Pillow mode 'I;16', .* mode='RGB' would clip: set mode='F'"
    ):
        batches(Images(folder, on_bad_row=on_bad_row))
    seen = {
        float(image.max())
        for batch in batches(Images(folder, mode="F", on_bad_row=on_bad_row))
        for image in batch.micro_batches[0]["image"]
    }
    assert seen == {*map(float, range(90)), 40_000.0}


def test_an_unknown_mode_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="mode='rgb' is not a mode of Pillow"):
        batches(Images(folder, mode="rgb"))


def test_an_image_is_a_tensor_of_bytes_with_the_label_of_its_folder(folder: Path) -> None:
    seen = set()
    for batch in batches(Images(folder)):
        (columns,) = batch.micro_batches
        assert columns["image"].dtype == torch.uint8
        assert columns["image"].shape[1:] == (4, 6, 3)
        for image, label, name in zip(columns["image"], columns["label"].tolist(), batch.row_ids()[0], strict=True):
            number = int(image[0, 0, 0])
            assert (image == number).all()
            assert label == number // 30
            assert name == f"{CLASSES[label]}/{'deep/' if number % 2 else ''}{number:02d}.png"
            seen.add(number)
    assert seen == set(range(90))


@RAY_IF_EXTENDED
def test_a_resize_changes_nothing(folder: Path, engine: str) -> None:
    whole = numbers(Images(folder), engine=engine)
    assert sorted(number for batch in whole for number in batch) == list(range(90))
    assert numbers(Images(folder), world_size=3)[:4] + numbers(Images(folder), world_size=2, offset=32) == whole


def test_neighbours_are_of_different_classes(folder: Path) -> None:
    source = Images(folder).open()
    assert len(source.fragment_rows) == 6
    assert all(set(source.fragment(index).labels.tolist()) == {0, 1, 2} for index in range(6))  # type: ignore[union-attr]


def test_images_of_different_sizes_are_a_list_until_a_transform_makes_them_equal(folder: Path) -> None:
    Image.new("L", (9, 9), 200).save(folder / "bee" / "large.jpg")

    def crop(columns: Any) -> Any:
        return {"image": [image[:4, :4] for image in columns["image"]], "label": columns["label"]}

    raw = [image.shape for batch in batches(Images(folder)) for image in batch.micro_batches[0]["image"]]
    assert sorted(set(raw)) == [(4, 6, 3), (9, 9, 3)]
    cropped = [batch.micro_batches[0]["image"] for batch in batches(Images(folder, mode="L"), transforms=[crop])]
    assert {images.shape[1:] for images in cropped} == {(4, 4)}


def test_every_image_of_a_folder_is_read_whatever_its_kind(tmp_path: Path) -> None:
    """GIFs (their first frame), palettes, CMYK, and images with transparency."""
    for name, mode in (("a.gif", "P"), ("b.png", "P"), ("c.jpg", "CMYK"), ("d.png", "RGBA"), ("e.PNG", "LA")):
        Image.new(mode, (4, 3)).save(tmp_path / name)
    Image.new("RGB", (4, 3)).save(tmp_path / "f.jfif", format="JPEG")
    source = Images(tmp_path).open()
    assert source.rows == 6
    assert source.fragment(0).read()["image"].shape == (6, 3, 4, 3)


def test_photos_are_turned_as_their_exif_data_say_only_on_request(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    Image.new("RGB", (8, 3)).save(tmp_path / "a.jpg", exif=exif)
    stored, turned = (Images(tmp_path, apply_exif_orientation=each).open() for each in (False, True))
    assert stored.fragment(0).read()["image"].shape == (1, 3, 8, 3)
    assert turned.fragment(0).read()["image"].shape == (1, 8, 3, 3)
    assert turned.fragment(0).take(slice(0, 1)).read()["image"].shape == (1, 8, 3, 3)
    assert stored.fingerprint != turned.fingerprint


def test_images_without_folders_have_no_label(folder: Path) -> None:
    assert set(batches(Images(folder / "ant" / "deep"))[0].micro_batches[0]) == {"image"}
    (folder / "ant.png").write_bytes((folder / "ant" / "00.png").read_bytes())
    with pytest.raises(DataError, match=r"ant\.png in .*photos is in no folder of a class"):
        Images(folder).open()


def test_classes_fix_the_labels(folder: Path) -> None:
    source = Images(folder, classes=["dog", "cat", "bee", "ant"]).open()
    assert source.labels is not None
    assert set(zip((name[:3] for name in source.names), source.labels.tolist(), strict=True)) == {
        ("ant", 3), ("bee", 2), ("cat", 1)
    }  # fmt: skip
    assert source.fingerprint != Images(folder).open().fingerprint
    with pytest.raises(DataError, match="classes lacks 'ant', a folder in .*; did you mean 'aunt'"):
        Images(folder, classes=["aunt", "bee", "cat"]).open()
    with pytest.raises(DataError, match="classes must be a list of names, or None for all, got 'ant'"):
        Images(folder, classes="ant")


def test_a_file_that_is_no_image_is_named_or_skipped_and_counted(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "bee" / "text.jpg").write_text("not an image")
    with pytest.raises(DataError, match=r"bee/text\.jpg in .* is not an image: UnidentifiedImageError: Pillow does"):
        Images(folder).open()
    seen = numbers(Images(folder, on_bad_row="skip"))
    assert sorted(number for batch in seen for number in batch) == list(range(90))
    assert "1 damaged rows" in caplog.text


def test_damaged_pixels_are_named_when_they_are_read_or_skipped_from_the_start(folder: Path) -> None:
    path = folder / "cat" / "80.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(DataError, match=r"cat/80\.png in .* is damaged: .*Remove it, or set on_bad_row='skip'"):
        batches(Images(folder))
    source = Images(folder, on_bad_row="skip").open()
    assert (source.rows, source.skipped_rows) == (89, 1)
    assert sorted(number for batch in numbers(Images(folder, on_bad_row="skip")) for number in batch) == [
        each for each in range(90) if each != 80
    ]


def test_a_file_that_changes_during_a_run_is_an_error(folder: Path) -> None:
    source = Images(folder).open()
    at = source.names.index("ant/00.png")
    (folder / "ant" / "00.png").write_bytes(b"other")
    with pytest.raises(DataError, match=r"ant/00\.png in .* has changed since the run started"):
        source.fragment(at // 16).read()
    (folder / "ant" / "00.png").unlink()
    with pytest.raises(DataError, match=r"cannot read ant/00\.png in .*: FileNotFoundError"):
        source.fragment(at // 16).read()


def test_the_index_is_built_once_and_again_for_other_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Images(folder).open()
    monkeypatch.setattr("headway.datasets.formats.images._header", lambda *_, **__: pytest.fail("read again"))
    assert Images(folder).open().fingerprint == before.fingerprint
    monkeypatch.undo()
    (folder / "ant" / "00.png").unlink()
    after = Images(folder).open()
    assert after.rows == 89
    assert after.fingerprint != before.fingerprint


def test_what_is_no_folder_of_images_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").touch()
    with pytest.raises(DataError, match=r"has no file that ends in \.jpg, .*; there is: notes\.txt"):
        Images(tmp_path / "empty").open()
    with pytest.raises(DataError, match="path must be one folder, got "):
        Images([folder, tmp_path])  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"^\S*00.png is not a folder"):
        Images(folder / "ant" / "00.png").open()
    with pytest.raises(DataError, match="is remote, so its index needs a local folder"):
        Images(f"file://{folder}").open()
    assert Images(f"file://{folder}", index=tmp_path / "index").open().rows == 90


def test_without_pillow_the_error_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"images need Pillow: pip install 'headway\[images\]'"):
        Images(folder).open()


def test_only_the_images_that_are_needed_are_decoded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sources, of whose fragments of 16 images each read takes a few."""
    data = Mixture({"one": (Images(folder), 1), "two": (Images(folder), 1)}, on_end="drop")
    whole = numbers(data)
    decoded = []
    decode = images._decode
    monkeypatch.setattr(images, "_decode", lambda *args: decoded.append(args) or decode(*args))
    monkeypatch.setattr(memory_limits, "_MIXED_TIMES", 0)
    monkeypatch.setattr(memory_limits, "_MIXED_BYTES", 3 * 72 * 2 * 8)
    stream = Stream(data, engine="threads", tail="keep")
    stream.setup(shard_info())
    assert stream._opened is not None
    reads = list(stream._opened.reads(0, 0))
    assert all(each.stop - each.start <= 3 for one in reads for each in one.slices)
    for one in reads:
        read(stream._opened.job(one))
    assert len(decoded) == 180, "each image once"
    assert numbers(data) == whole


def test_images_are_mixed(folder: Path) -> None:
    mixture = Mixture({name: (Images(folder / name / "deep"), 1) for name in CLASSES}, on_end="drop")
    assert sorted(number for batch in numbers(mixture) for number in batch) == list(range(1, 90, 2))


@pytest.mark.parametrize("on_bad_row", ["raise", "skip"])
def test_images_in_a_zip_are_those_of_the_folder(folder: Path, tmp_path: Path, on_bad_row: Any) -> None:
    (folder / "bee" / "31.png").write_bytes(b"no image") if on_bad_row == "skip" else None
    archive = shutil.make_archive(str(tmp_path / "photos"), "zip", folder)
    index = tmp_path / "index"
    zipped = Images(f"zip://::file://{archive}", index=index, on_bad_row=on_bad_row)
    assert numbers(zipped) == numbers(Images(folder, on_bad_row=on_bad_row, index=index))


def test_a_zip_is_opened_once_and_again_when_it_is_replaced(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    init = ZipFileSystem.__init__
    monkeypatch.setattr(ZipFileSystem, "__init__", lambda self, *a, **o: opened.append("") or init(self, *a, **o))
    for level in (0, 100):
        archive = shutil.make_archive(str(tmp_path / "photos"), "zip", folder)
        zipped = Images(f"zip://::file://{archive}", index=tmp_path / "index").open()
        opened.clear()
        pixels = [zipped.fragment(index).read()["image"] for index in range(6)]
        assert len(opened) == 1
        assert min(int(each.min()) for each in pixels) == level
        for number in range(90):  # another archive, with other pixels
            (path,) = folder.rglob(f"{number:02d}.png")
            Image.fromarray(np.full((4, 6, 3), 100 + number, np.uint8)).save(path)


class Unplugged(MemoryFileSystem):
    """A file system whose network fails while one file is read, or when it is opened."""

    protocol = "unplugged"
    fails = "bee/31.png"
    when = "read"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(path.replace("unplugged://", "memory://"))

    def _open(self, path: str, *args: Any, **options: Any) -> Any:
        if path.endswith(self.fails) and self.when == "open":
            raise ConnectionResetError("the network is down")
        file = super()._open(path, *args, **options)
        content = io.BytesIO(file.getvalue())
        if path.endswith(self.fails) and self.when == "read":
            content.read = lambda size=-1: (_ for _ in ()).throw(RuntimeError("the network is down"))  # type: ignore[method-assign]
        return content


@pytest.mark.parametrize("on_bad_row", ["raise", "skip"])
@pytest.mark.parametrize("when", ["open", "read"])
def test_a_network_that_fails_is_no_damage(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, on_bad_row: Any
) -> None:
    fsspec.register_implementation("unplugged", Unplugged, clobber=True)
    fs = fsspec.filesystem("memory")
    fs.put(f"{folder}/", "/photos/", recursive=True)
    (damaged,) = fs.glob("/photos/ant/01.png") or fs.glob("/photos/ant/deep/01.png")
    fs.pipe(damaged, b"no image")
    monkeypatch.setattr(Unplugged, "when", when)
    monkeypatch.setattr(Unplugged, "fails", "bee/deep/31.png")
    photos = Images("unplugged://photos", index=tmp_path / "index", on_bad_row=on_bad_row)
    try:
        with pytest.raises(DataError, match=r"cannot read bee/deep/31.png in unplugged.*the network is down"):
            photos.open()
        monkeypatch.setattr(Unplugged, "when", "never")
        if on_bad_row == "skip":
            assert photos.open().skipped_rows == 1, "no index was kept, and only the damaged image is left out"
    finally:
        fs.rm("/photos", recursive=True)
