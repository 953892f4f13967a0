"""Finding Parquet files, and errors about them."""

from __future__ import annotations

import re
import shutil
import uuid
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headway.datasets.errors import DataError
from headway.datasets.show import describe, read_row
from headway.datasets.sources import read_source
from headway.datasets.stream import ParquetStream

from .conftest import shard_info, write
from .test_stream import steps


def test_a_folder_is_searched_to_its_bottom_in_the_order_of_names(folder: Path) -> None:
    write(folder / "_temporary" / "x.parquet", range(5))
    write(folder / ".hidden.parquet", range(5))
    (folder / "notes.txt").write_text("not data")
    source = read_source(folder)
    assert [file.name for file in source.files] == ["a.parquet", "b.parquet", "deep/c.parquet"]
    assert source.rows == 103
    assert source.fragment_rows.tolist() == [16, 16, 8, 16, 16, 8, 16, 7]
    assert source.fragment_files.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert source.fragment_groups.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert source.columns == ["id", "tokens"]
    assert source.row_bytes == 8 + 4 * 4


def test_a_file_a_glob_and_a_list_are_the_same_data(folder: Path) -> None:
    assert read_source(folder / "a.parquet").rows == 40
    assert read_source(str(folder / "*.parquet")).rows == 80
    listed = read_source([folder / "deep" / "c.parquet", folder / "a.parquet", str(folder / "b.parquet")])
    assert (
        listed.fingerprint == read_source(folder).fingerprint == read_source(str(folder / "**/*.parquet")).fingerprint
    )


def test_a_uri_is_read_through_fsspec(folder: Path) -> None:
    memory = fsspec.filesystem("memory")
    root = f"/{uuid.uuid4().hex}"
    memory.put(str(folder), root, recursive=True)
    try:
        source = read_source(f"memory:/{root}")
        assert source.rows == 103
        assert source.files[0].path == f"memory://{root}/a.parquet"
        assert len(steps(f"memory:/{root}")) == 12
        assert source.fingerprint == read_source(folder).fingerprint
        assert read_source(f"memory:/{root}/*.parquet").rows == 80
        assert read_source(f"memory:/{root}/a.parquet").rows == 40
        assert describe(f"memory:/{root}").first_row == {"id": 0, "tokens": [0, 1, 2, 3]}
        with pytest.raises(DataError, match="does not exist; did you mean 'a.parquet'"):
            read_source(f"memory:/{root}/aa.parquet")
    finally:
        memory.rm(root, recursive=True)


def test_only_the_footers_are_read(folder: Path) -> None:
    """Unreadable rows cause no error before they are read."""
    path = folder / "a.parquet"
    path.write_bytes(b"PAR1" + bytes(100) + path.read_bytes()[104:])
    assert read_source(folder).rows == 103


def test_the_fingerprint_stays_when_the_data_moves_and_changes_with_it(folder: Path, tmp_path: Path) -> None:
    before = read_source(folder).fingerprint
    assert len(before) == 16
    assert read_source(shutil.copytree(folder, tmp_path / "moved")).fingerprint == before
    assert read_source(folder, columns=["tokens"]).fingerprint == before
    (folder / "a.parquet").rename(folder / "aa.parquet")
    renamed = read_source(folder).fingerprint
    (folder / "aa.parquet").unlink()
    assert len({before, renamed, read_source(folder).fingerprint}) == 3


def test_other_values_of_the_same_size_and_range_change_the_fingerprint(tmp_path: Path) -> None:
    """Uncompressed and with equal statistics: the footers are equal, the middle of the file is not."""
    prints = set()
    for seed in range(2):
        values = np.random.default_rng(seed).integers(1, 99, 50_000)
        values[:2] = 0, 99
        path = tmp_path / "same.parquet"
        pq.write_table(pa.table({"x": values}), path, compression="none", use_dictionary=False)
        prints.add((read_source(path).fingerprint, path.stat().st_size))
    assert len({size for _, size in prints}) == 1
    assert len(prints) == 2


def test_a_missing_path_names_its_neighbours(folder: Path) -> None:
    (folder.parent / ".headway-index").mkdir()
    with pytest.raises(DataError, match=r"dat does not exist; did you mean 'data'\? There is: data in "):
        read_source(folder.parent / "dat")
    with pytest.raises(DataError, match="no file matches .*nothing"):
        read_source(folder / "nothing*.parquet")


def test_an_empty_folder_says_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no file that ends in .parquet.*there is: nothing"):
        read_source(tmp_path)
    (tmp_path / "rows.csv").write_text("a,b\n")
    with pytest.raises(DataError, match=r"there is: rows\.csv\. Read CSV with HuggingFace"):
        read_source(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "advice"),
    [
        ("rows.csv", b"id\n1\n", r"rows\.csv is not a Parquet file: .* Read CSV with HuggingFace\(datasets"),
        ("data.arrow", b"ARROW1", r"data\.arrow is not a .* HuggingFace\(datasets\.load_from_disk\(path\)\)"),
        ("rows.jsonl", b'{"id": 1}\n', r"rows\.jsonl is not a .* Read JSON Lines with JsonLines\(path\)"),
        ("train.bin", b"\0" * 64, r"train\.bin is not a .* with a torch Dataset of your own, in a DataLoader"),
        ("empty.parquet", b"", r"empty\.parquet is not a Parquet file: it is empty; remove it$"),
    ],
)
def test_a_file_of_another_format_names_what_reads_it(tmp_path: Path, name: str, content: bytes, advice: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=advice):
        read_source(tmp_path / name)


def test_folders_of_partitions_are_no_columns_and_names_may_be_in_upper_case(tmp_path: Path) -> None:
    for year in (2020, 2021):
        write(tmp_path / f"year={year}" / "PART.PARQUET", range(year, year + 3))
    for name in ("_SUCCESS", "_metadata", ".PART.PARQUET.crc"):
        (tmp_path / name).write_bytes(b"x")
    assert read_source(tmp_path).rows == 6
    with pytest.raises(DataError, match="no column 'year', only a folder of that name.*write it into the files"):
        read_source(tmp_path, columns=["id", "year"])
    with pytest.raises(DataError, match=r"braces are not expanded: use \* instead, or a list"):
        read_source(tmp_path / "year={2020..2021}" / "PART.PARQUET")


def test_no_rows_at_all(tmp_path: Path) -> None:
    write(tmp_path / "empty.parquet", range(0))
    with pytest.raises(DataError, match="holds 1 Parquet file but no rows"):
        read_source(tmp_path)
    write(tmp_path / "full.parquet", range(3))
    assert read_source(tmp_path).rows == 3


def test_a_column_that_is_not_there(folder: Path) -> None:
    with pytest.raises(DataError, match=r"no column 'tokns'; did you mean 'tokens'\? There is: id, tokens"):
        read_source(folder, columns=["tokns"])
    with pytest.raises(DataError, match="columns must be a list of names"):
        read_source(folder, columns="tokens")


def test_schemas_that_differ_are_named(folder: Path) -> None:
    pq.write_table(pa.table({"id": ["x"], "text": ["y"]}), folder / "d.parquet")
    with pytest.raises(
        DataError, match=r"schemas of .*a\.parquet and .*d\.parquet differ: 'id' is int64 in the first and str"
    ):
        read_source(folder)
    write(folder / "d.parquet", range(3), extra=np.arange(3))
    with pytest.raises(DataError, match="'extra' is missing in the first and int64 in the second"):
        read_source(folder)
    assert read_source(folder, columns=["id", "tokens"]).rows == 106


def test_what_is_read_alike_may_be_written_differently(tmp_path: Path) -> None:
    """Files of several writers: other column order, nullability and string type."""
    rows = {"x": [1.5], "s": ["a"], "m": [[{"r": "u"}]]}
    messages = pa.list_(pa.struct([("r", pa.string())]))
    wide = pa.large_list(pa.struct([("r", pa.large_string())]))
    schemas = [
        pa.schema([("x", pa.float64()), ("s", pa.string()), ("m", messages)]),
        pa.schema([("m", wide), ("s", pa.large_string()), pa.field("x", pa.float64(), nullable=False)]),
        pa.schema([("s", pa.dictionary(pa.int8(), pa.string())), ("x", pa.float64()), ("m", messages)]),
    ]
    for index, schema in enumerate(schemas):
        pq.write_table(pa.table(rows, schema=schema), tmp_path / f"{index}.parquet")
    assert read_source(tmp_path).columns == ["x", "s", "m"]
    stream = ParquetStream(tmp_path, engine="threads", shards=1)
    stream.setup(shard_info(global_batch_size=3))
    (batch,) = stream.epoch(0)
    stream.close()
    columns = batch.micro_batches[0]
    assert columns["x"].tolist() == [1.5] * 3
    assert (columns["s"], columns["m"]) == (["a"] * 3, [[{"r": "u"}]] * 3)

    pq.write_table(pa.table({**rows, "x": np.ones(1, np.float32)}), tmp_path / "3.parquet")
    with pytest.raises(DataError, match=r"differ: 'x' is double in the first and float in the second\. "):
        read_source(tmp_path)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_arrays([pa.array([1])] * 2, names=["a", "a"]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="several columns called 'a'"):
        read_source(tmp_path)


def test_a_pattern_may_match_folders(folder: Path) -> None:
    write(folder / "year=1" / "month=2" / "x.parquet", range(5))
    write(folder / "year=2" / "x.parquet", range(7))
    write(folder / "spark.parquet" / "part-0.parquet", range(2))
    write(folder / "_old" / "x.parquet", range(100))
    (folder / "spark.parquet" / "_SUCCESS").touch()
    assert read_source(str(folder / "year=*")).rows == 12
    assert read_source(str(folder / "*.parquet")).rows == 80 + 2
    assert read_source(str(folder / "*")).rows == 103 + 12 + 2
    assert read_source(f"file://{folder}/year=*").rows == 12
    (folder / "nothing").mkdir()
    with pytest.raises(DataError, match=r"no file matches .*/not\*, and no folder with \.parquet"):
        read_source(str(folder / "not*"))


@pytest.mark.parametrize(
    ("uri", "names"),
    [
        ("zip://a.parquet::{}/data.zip", ["a.parquet"]),
        ("zip://*.parquet::file://{}/data.zip", ["a.parquet", "b.parquet"]),
        ("zip://::file://{}/data.zip", ["a.parquet", "b.parquet", "deep/c.parquet"]),
        ("zip://deep::data.zip", ["c.parquet"]),
        ("simplecache::file://{}/data", ["a.parquet", "b.parquet", "deep/c.parquet"]),
        ("simplecache::zip://*.parquet::file://{}/data.zip", ["a.parquet", "b.parquet"]),
        ("dir://a.parquet::file://{}/data", ["a.parquet"]),
    ],
)
def test_chained_uris_are_read_in_any_process(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str, names: list[str]
) -> None:
    shutil.make_archive(str(tmp_path / "data"), "zip", folder)
    monkeypatch.chdir(tmp_path)
    stream = ParquetStream(uri.format(tmp_path), engine="threads", shuffle=False, shards=1)
    monkeypatch.chdir("/")
    stream.setup(shard_info(global_batch_size=4))
    assert [each.name for each in stream.source.files] == names
    batch = next(iter(stream.epoch(0)))
    stream.close()
    assert batch.micro_batches[0]["id"].tolist() == ([80, 81, 82, 83] if names == ["c.parquet"] else [0, 1, 2, 3])
    if "cache" in uri:
        assert all("simplecache::" in each.path for each in stream.source.files)


def test_no_path_at_all() -> None:
    with pytest.raises(DataError, match="path is empty"):
        ParquetStream([], engine="threads").setup(shard_info())


@pytest.mark.parametrize("content", [b"", b"not Parquet at all, but long enough to be", b"PAR1" + bytes(40) + b"PAR1"])
def test_what_is_no_parquet_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.parquet").write_bytes(content)
    with pytest.raises(DataError, match=r"bad\.parquet is not a .*Parquet file"):
        read_source(tmp_path)


def test_a_file_that_was_cut_off_is_named(folder: Path) -> None:
    path = folder / "a.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"a\.parquet is not a Parquet file"):
        read_source(folder)


def test_a_file_named_twice_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r"a\.parquet is listed twice"):
        read_source([folder, folder / "a.parquet"])


def test_an_unknown_protocol_is_refused() -> None:
    for uri in ("nosuch://bucket/data", "zip://a.parquet::/no/such.zip", "zip://a.parquet::nosuch://bucket/data.zip"):
        with pytest.raises(DataError, match=f"cannot read {uri}: "):
            read_source(uri)


def test_describe_shows_a_dataset_at_a_glance(folder: Path) -> None:
    shown = describe(folder)
    assert (shown.rows, shown.files, shown.fragments) == (103, 3, 8)
    assert shown.columns == {"id": "int64", "tokens": "fixed_size_list<element: int32>[4]"}
    assert shown.first_row == {"id": 0, "tokens": [0, 1, 2, 3]}
    text = str(shown)
    for part in ("103", "row groups   8", "files        3", shown.fingerprint, "[0, 1, 2, 3]"):
        assert part in text


def test_what_cannot_be_trained_on_can_be_looked_at(tmp_path: Path) -> None:
    """Nulls among numbers, and files that differ in other columns: rows named in errors can be looked up."""
    write(tmp_path / "a.parquet", range(3), x=pa.array([None, 1.5, 2.5]), deep=[[1, None], None, []])
    assert describe(tmp_path).first_row["x"] is None
    assert read_row(tmp_path, "a.parquet[0]:0") == {"id": 0, "tokens": [0, 1, 2, 3], "x": None, "deep": [1, None]}
    write(tmp_path / "b.parquet", range(3))
    assert read_row(tmp_path, "b.parquet[0]:2", columns=["id"]) == {"id": 2}
    with pytest.raises(DataError, match="'x' is double in the first and missing in the second"):
        read_row(tmp_path, "b.parquet[0]:2")


def test_a_row_is_found_by_its_name(folder: Path) -> None:
    assert read_row(folder, "deep/c.parquet[1]:2") == {"id": 98, "tokens": [98, 99, 100, 101]}
    for row, problem in {
        "17": "a row id looks like",
        "c.parquet[0]:1": "no file 'c.parquet'; did you mean",
        "a.parquet[0]:16": "no row 16 in row group 0; its rows are 16 in group 0, 16 in group 1, 8 in group 2",
        "a.parquet[3]:0": "no row 0 in row group 3",
    }.items():
        with pytest.raises(DataError, match=re.escape(problem)):
            read_row(folder, row)
