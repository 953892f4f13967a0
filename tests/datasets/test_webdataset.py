"""WebDataset tars: every row once in any order, damage, and the index."""

from __future__ import annotations

import gzip
import io
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from headway.datasets.errors import DataError
from headway.datasets.formats import webdataset
from headway.datasets.formats.webdataset import WebDataset
from headway.datasets.stream import Stream

from .conftest import shard_info


def write_tar(path: Path, rows: range, **replaced: bytes | None) -> Path:
    """Write rows {jpg, cls, json}; `r7_cls=b"x"` replaces the cls of row 7, and None leaves it out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for row in rows:
            contents = {"jpg": f"image {row}".encode() * (row % 5), "cls": str(row).encode(), "json": b'{"a": [1]}'}
            for extension, content in contents.items():
                if (data := replaced.get(f"r{row}_{extension}", content)) is not None:
                    member = tarfile.TarInfo(f"./{row // 10}/{row:03d}.{extension}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return path


@pytest.fixture
def tars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """103 rows in three tars and many fragments."""
    monkeypatch.setattr(webdataset, "_FRAGMENT_ROWS", 8)
    write_tar(tmp_path / "data" / "a.tar", range(0, 40))
    write_tar(tmp_path / "data" / "b.tar", range(40, 80))
    write_tar(tmp_path / "data" / "deep" / "c.tar", range(80, 103))
    return tmp_path / "data"


def batches(data: Any, *, rank: int = 0, world_size: int = 1, offset: int = 0, engine: str = "threads") -> Any:
    stream = Stream(data, engine=engine, tail="keep")  # type: ignore[arg-type]
    stream.setup(shard_info(rank, world_size))
    try:
        return list(stream.epoch(0, offset=offset))
    finally:
        stream.close()


def rows(data: Any, *, world_size: int = 1, **options: Any) -> list[list[int]]:
    """Return the classes of each global batch, by rank."""
    ranks = [batches(data, rank=rank, world_size=world_size, **options) for rank in range(world_size)]
    return [
        [row for batch in step for row in batch.micro_batches[0]["cls"].tolist()] for step in zip(*ranks, strict=True)
    ]


def test_every_row_is_seen_once_and_a_resize_changes_nothing(tars: Path, engine: str) -> None:
    whole = rows(WebDataset(tars), engine=engine)
    assert sorted(row for batch in whole for row in batch) == list(range(103))
    assert rows(WebDataset(tars), world_size=2)[:5] + rows(WebDataset(tars), offset=40) == whole


def test_members_are_decoded_by_their_extension_and_rows_named_by_their_key(tars: Path) -> None:
    for batch in batches(WebDataset(tars)):
        (columns,) = batch.micro_batches
        assert set(columns) == {"__key__", "jpg", "cls", "json"}
        assert columns["cls"].dtype == torch.int64
        for at, row in enumerate(columns["cls"].tolist()):
            assert columns["jpg"][at] == f"image {row}".encode() * (row % 5)
            assert columns["json"][at] == {"a": [1]}
            assert columns["__key__"][at] == f"./{row // 10}/{row:03d}"
            tar = "a.tar" if row < 40 else "b.tar" if row < 80 else "deep/c.tar"
            assert batch.row_ids()[0][at] == f"{tar}/{columns['__key__'][at]}"
    assert set(batches(WebDataset(tars, columns=["cls"]))[0].micro_batches[0]) == {"__key__", "cls"}


@pytest.mark.parametrize(
    ("replaced", "why"),
    [
        ({"r7_cls": b"seven"}, "its cls is damaged: invalid literal"),
        ({"r7_json": b"{"}, "its json is damaged"),
        ({"r7_jpg": None}, "it has no jpg"),
    ],
)
def test_a_damaged_row_is_named_and_skipped_only_on_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, replaced: dict[str, bytes | None], why: str
) -> None:
    path = write_tar(tmp_path / "rows.tar", range(20), **replaced)
    with pytest.raises(DataError, match=rf"rows.tar/./0/007 is not a row: {why}.*on_bad_row='skip'"):
        WebDataset(path).open()
    data = WebDataset(path, on_bad_row="skip")
    seen = sorted(row for batch in rows(data, world_size=2) for row in batch)
    assert seen == [*range(7), *range(8, 20)]
    assert "1 damaged rows of" in caplog.text


def test_a_truncated_damaged_or_foreign_file_is_named_with_the_place(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "rows.tar", range(20))
    content = path.read_bytes()
    advice = "Write or download it again, or leave it out of path$"
    path.write_bytes(content[: 512 * 58 + 600])
    with pytest.raises(
        DataError,
        match=rf"rows\.tar is not a complete tar file: .*, after the header of .* at byte \d+\. {advice}",
    ):
        WebDataset(path).open()
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        before, following = tar.getmembers()[6:8]
    path.write_bytes(content[: following.offset] + b"damage" * 20 + content[following.offset + 120 :])
    at = f"the next header is damaged, after the header of {before.name} at byte {before.offset}"
    with pytest.raises(DataError, match=rf"rows\.tar is not a complete tar file: {at}\. {advice}"):
        WebDataset(path).open()
    path.write_text("no tar" * 1000)
    with pytest.raises(DataError, match=rf"rows\.tar is not a complete tar file: .*, at its start\. {advice}"):
        WebDataset(path).open()


@pytest.mark.parametrize("keep", [0, 2000, -4])
def test_a_truncated_compressed_tar_is_named_with_the_place(tmp_path: Path, keep: int) -> None:
    plain = write_tar(tmp_path / "rows.tar", range(20))
    path = tmp_path / "packed" / "rows.tar.gz"
    path.parent.mkdir()
    path.write_bytes(gzip.compress(plain.read_bytes(), 0)[:keep])
    message = (
        r"packed/rows\.tar\.gz is not a complete gzip file: .*, after \d+ bytes of what it holds\. Write or download"
    )
    with pytest.raises(DataError, match=message):
        WebDataset(path).open()
    path.write_bytes(gzip.compress(plain.read_bytes()[:-2048]))
    with pytest.raises(DataError, match=r"packed/rows\.tar\.gz is not a complete tar file: .* at byte"):
        WebDataset(path).open()


def test_rows_of_one_tar_with_equal_keys_are_refused(tmp_path: Path) -> None:
    """Their ids would be equal; most often they are one row, whose members are not next to each other."""
    path = members(tmp_path / "rows.tar", "0.jpg", "0.cls", "1.jpg", "1.cls", "0.jpg", "0.cls")
    with pytest.raises(
        DataError, match=r"rows\.tar/0 is not a row: 2 rows .* have this key.* next to each other, .*, and 1 more rows"
    ):
        WebDataset(path).open()
    assert WebDataset(path, on_bad_row="skip").open().tars[0].keys == ("1",)
    path = members(tmp_path / "rows.tar", "0.jpg", "0.cls", "1.jpg", "1.cls", "0.txt")
    assert WebDataset(path, columns=["jpg", "cls"], on_bad_row="skip").open().tars[0].keys == ("0", "1")


def test_the_index_is_built_once_and_the_fingerprint_follows_the_contents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    build = webdataset._build
    monkeypatch.setattr(webdataset, "_build", lambda found, *shown: (built.append(found.path), build(found, *shown))[1])
    path = write_tar(tmp_path / "here" / "rows.tar", range(20))
    before = WebDataset(path, index=tmp_path / "index").open().fingerprint
    assert WebDataset(path, index=tmp_path / "index").open().fingerprint == before
    assert len(built) == 1
    assert WebDataset(write_tar(tmp_path / "there" / "rows.tar", range(20))).open().fingerprint == before
    write_tar(path, range(21))
    assert WebDataset(path, index=tmp_path / "index").open().fingerprint != before


@pytest.mark.parametrize(("suffix", "codec"), [(".tar.gz", "gzip"), (".TGZ", "gzip"), (".tar.zst", "zstd")])
def test_a_compressed_tar_is_read_from_the_folder_of_the_index(tmp_path: Path, suffix: str, codec: str) -> None:
    plain = write_tar(tmp_path / "rows.tar", range(40))
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / f"rows{suffix}").write_bytes(pa.compress(plain.read_bytes(), codec, asbytes=True))
    data = WebDataset(tmp_path / "packed", index=tmp_path / "index")
    whole = rows(data)
    assert sorted(row for batch in whole for row in batch) == list(range(40))
    assert rows(data, world_size=2)[:2] + rows(data, offset=16) == whole == rows(WebDataset(plain))
    assert data.open().row_name(0, 0) == f"rows{suffix}/./0/000"
    (tmp_path / "rows.tar.xz").write_bytes(b"\xfd7zXZ")
    with pytest.raises(
        DataError, match=r"rows\.tar\.xz is not a complete tar file: .* Compress it with gzip or Zstandard$"
    ):
        WebDataset(tmp_path / "rows.tar.xz").open()


def members(path: Path, *names: str, link: str | None = None) -> Path:
    """Write members with these names; the one called `link` is a hard link."""
    with tarfile.open(path, "w") as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            if name == link:
                member.type, member.linkname = tarfile.LNKTYPE, names[0]
            member.size = 0 if name == link else 1
            tar.addfile(member, None if name == link else io.BytesIO(b"7"))
    return path


def test_extensions_are_read_in_lower_case(tmp_path: Path) -> None:
    path = members(tmp_path / "rows.tar", "0.JPG", "0.CLS", "1.jpg", "1.Cls")
    read = WebDataset(path).open().fragment(0).read()
    assert read["cls"].tolist() == [7, 7]
    assert read["jpg"].tolist() == [b"7", b"7"]


@pytest.mark.parametrize(
    ("names", "link", "message"),
    [
        (["0.jpg", "1.jpg", "1.cls"], None, r"rows.tar/1 has cls, which the first row lacks: name .* columns="),
        (["a.0.jpg", "b.1.jpg"], None, r"rows.tar/b has 1.jpg, .*\(a key ends at the first dot of a file name\)"),
        (["0.jpg", "1.jpg", "0.cls", "1.cls"], None, "0 has cls, .* write the members of a row next to each other"),
        (["0.cls", "0.jpg", "1.cls", "0.jpg"], None, "1 is not a row: it has no jpg"),
        (["0.jpg", "0.jpg"], None, "0 is not a row: it has several jpg"),
        (["0.jpg", "0.png"], "0.png", "0 is not a row: its png is a link or a device: write the tar with --deref"),
    ],
)
def test_members_that_would_be_lost_are_named(tmp_path: Path, names: list[str], link: str | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        WebDataset(members(tmp_path / "rows.tar", *names, link=link)).open()


def test_a_member_that_is_stored_in_pieces_is_refused(tmp_path: Path) -> None:
    """Its bytes are not one range of the tar: what follows it would be read instead of zeros."""
    with (tmp_path / "0.bin").open("wb") as file:
        file.truncate(200_000)
        file.seek(100_000)
        file.write(b"x")
    path = tmp_path / "rows.tar"
    subprocess.run(["tar", "--sparse", "-cf", path, "-C", tmp_path, "0.bin"], check=True)
    with pytest.raises(DataError, match="0 is not a row: its bin is stored in pieces: write the tar without --sparse"):
        WebDataset(path).open()


def test_options_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "rows.tar", range(20))
    with pytest.raises(DataError, match="on_bad_row must be 'raise' or 'skip', got 'ignore'"):
        WebDataset(path, on_bad_row="ignore")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="no row has the extension 'png'"):
        WebDataset(path, columns=["png"]).open()
    with pytest.raises(DataError, match="columns must be a list of names"):
        WebDataset(path, columns="jpg")
    with tarfile.open(tmp_path / "empty.tar", "w"):
        pass
    with pytest.raises(DataError, match="empty.tar has no rows"):
        WebDataset(tmp_path / "empty.tar").open()
