"""JSON Lines: every line once in any order, types that do not depend on the fragment, damage, and the index."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings, strategies as st

from headway.datasets.errors import DataError
from headway.datasets.formats import jsonl
from headway.datasets.formats.jsonl import JsonLines
from headway.datasets.stream import Stream

from .conftest import RAY_IF_EXTENDED, shard_info


def write_lines(path: Path, rows: range, *, compression: str | None = None) -> Path:
    """Write rows {id, text, tokens}, with a blank line before every tenth."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        ("\n" if i % 10 == 0 else "") + json.dumps({"id": i, "text": f"row {i} \u2028é\r", "tokens": [i] * (i % 3)})
        for i in rows
    ]
    data = "\n".join(lines).encode()
    if compression == "gz":
        data = gzip.compress(data)
    if compression == "zst":
        data = pa.compress(data, codec="zstd", asbytes=True)
    path.write_bytes(data)
    return path


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """103 rows in three files, plain and compressed, and many fragments."""
    monkeypatch.setattr(jsonl, "_FRAGMENT_ROWS", 8)
    write_lines(tmp_path / "data" / "a.jsonl", range(0, 40))
    write_lines(tmp_path / "data" / "b.jsonl.gz", range(40, 80), compression="gz")
    write_lines(tmp_path / "data" / "deep" / "c.ndjson.zst", range(80, 103), compression="zst")
    return tmp_path / "data"


def opened(data: Any, *, rank: int = 0, world_size: int = 1, **options: Any) -> Stream:
    stream = Stream(data, engine=options.pop("engine", "threads"), tail="keep")
    stream.setup(shard_info(rank, world_size, **options))
    return stream


def steps(data: Any, *, world_size: int = 1, offset: int = 0, **options: Any) -> list[list[int]]:
    """Return the ids of each global batch, by rank."""
    ranks = []
    for rank in range(world_size):
        stream = opened(data, rank=rank, world_size=world_size, **options)
        ranks.append([batch.micro_batches[0]["id"].tolist() for batch in stream.epoch(0, offset=offset)])
        stream.close()
    return [[row for own in step for row in own] for step in zip(*ranks, strict=True)]


@RAY_IF_EXTENDED
def test_every_row_is_seen_once_and_a_resize_changes_nothing(lines: Path, engine: str) -> None:
    whole = steps(JsonLines(lines), engine=engine)
    assert sorted(row for batch in whole for row in batch) == list(range(103))
    assert steps(JsonLines(lines), world_size=2)[:5] + steps(JsonLines(lines), world_size=1, offset=40) == whole


def test_columns_keep_their_types_and_rows_their_lines(lines: Path) -> None:
    stream = opened(JsonLines(lines))
    source = {path.name: path for path in lines.rglob("*.*") if path.is_file()}
    for batch in stream.epoch(0):
        (columns,) = batch.micro_batches
        ids = columns["id"].tolist()
        assert columns["id"].dtype == torch.int64
        assert columns["text"] == [f"row {i} \u2028é\r" for i in ids]
        assert [each.tolist() for each in columns["tokens"]] == [[i] * (i % 3) for i in ids]
        for row, name in zip(ids, batch.row_ids()[0], strict=True):
            file, _, line = str(name).rpartition(":")
            if file == "a.jsonl":
                assert json.loads(source[file].read_text().split("\n")[int(line) - 1])["id"] == row
    stream.close()


VALUES = st.one_of(st.integers(-5, 5), st.floats(-5, 5), st.lists(st.integers(0, 9), max_size=3), st.text(max_size=3))


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.dictionaries(st.sampled_from("abc"), VALUES, min_size=3), min_size=1, max_size=20))
def test_a_column_has_one_type_in_all_fragments(
    rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "_FRAGMENT_ROWS", 3)
        source = JsonLines(path).open()
    parts = [source.fragment(index).read() for index in range(len(source.fragment_rows))]
    back = [{name: part[name][i] for name in part} for part in parts for i in range(len(part["a"]))]
    for name, kind in source.columns:
        assert kind != "object" or len({part[name].dtype for part in parts}) == 1
        if kind in ("int", "float"):
            assert {part[name].dtype for part in parts} == {parts[0][name].dtype}
        plain = [row[name].tolist() if hasattr(row[name], "tolist") else row[name] for row in back]
        assert plain == [row[name] for row in rows]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{]", "JSONDecodeError"),
        ("[1]", "it is a list, not an object"),
        ("[", "it begins a JSON array, and each line must be an object on its own, as `jq -c '.\\[\\]'` writes it"),
        ("{\n", "it begins an object that ends in another line; write each on one line, as `jq -c .` does"),
        ("\xff", "UnicodeDecodeError"),
    ],
)
def test_a_damaged_line_is_named_and_skipped_only_on_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, why: str
) -> None:
    path = tmp_path / "rows.jsonl"
    good = [json.dumps({"id": i}) for i in range(20)]
    path.write_bytes("\n".join([*good[:7], text.strip(), *good[7:]]).encode("latin-1"))
    with pytest.raises(DataError, match=rf"line 8 of rows.jsonl is not a row: {why}.*on_bad_row='skip'"):
        opened(JsonLines(path))
    data = JsonLines(path, on_bad_row="skip")
    assert sorted(row for batch in steps(data, world_size=2) for row in batch) == list(range(20))
    assert "1 damaged rows of" in caplog.text
    source = data.open()
    assert source.skipped_rows == 1
    assert [source.row_name(0, row) for row in (6, 7, 19)] == ["rows.jsonl:7", "rows.jsonl:9", "rows.jsonl:21"]


def test_a_file_that_changes_under_a_run_is_noticed(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", range(40))
    stream = opened(JsonLines(path))
    path.write_text(path.read_text().replace("row 7", "row 8"))
    with pytest.raises(DataError, match=r"rows.jsonl from 1 on have changed"):
        list(stream.epoch(0))
    stream.close()


def test_the_fingerprint_follows_the_contents_and_not_the_place(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "here" / "rows.jsonl", range(40))
    packed = write_lines(tmp_path / "there" / "rows.jsonl", range(40))
    before = JsonLines(path).open().fingerprint
    assert JsonLines(packed).open().fingerprint == before
    path.write_text(path.read_text().replace("row 7", "row 8"))
    assert JsonLines(path).open().fingerprint != before


def test_a_number_that_is_null_somewhere_is_refused_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"x": 1, "y": "a"}\n{"y": null}\n{"x": 2.5, "y": "b"}\n')
    with pytest.raises(DataError, match="'x' is a number, but null or missing in line 2 of rows.jsonl"):
        JsonLines(path).open()
    rows = JsonLines(path, columns=["y"]).open().fragment(0).read()
    assert rows["y"].tolist() == ["a", None, "b"]
    with pytest.raises(DataError, match="no row has the key 'z'"):
        JsonLines(path, columns=["z"]).open()


def test_rows_without_any_key_are_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n" * 8)
    with pytest.raises(DataError, match=r"no row of rows.jsonl has a key"):
        opened(JsonLines(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize(
    ("name", "start", "message"),
    [
        ("rows.jsonl", gzip.compress(b"{}\n", mtime=0), "it is compressed with gzip, so its name must end in .gz"),
        ("rows.jsonl.bz2", b"BZh9", "it is compressed with bzip2; use gzip or Zstandard"),
        ("rows.jsonl", '{"id": 1}'.encode("utf-16"), "it is in UTF-16; convert it to UTF-8"),
        ("rows.parquet", b"PAR1", r"it is a Parquet file; read it with Parquet\(path\)"),
    ],
)
def test_what_is_no_text_is_refused_whatever_is_skipped(tmp_path: Path, name: str, start: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(start)
    with pytest.raises(DataError, match=rf"{name} is not plain text in UTF-8: {message}"):
        JsonLines(tmp_path / name, on_bad_row="skip").open()


def test_other_formats_are_named_and_endings_may_be_in_upper_case(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("id\n1\n")
    for path in (tmp_path, tmp_path / "rows.csv"):
        with pytest.raises(DataError, match=r"Read CSV with HuggingFace\(datasets"):
            JsonLines(path).open()
    (tmp_path / "ROWS.JSONL.GZ").write_bytes(gzip.compress(b'{"id": 1}\n'))
    assert JsonLines(tmp_path).open().rows == 1


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    for name in ("a.jsonl.gz", "b.jsonl.zst"):
        path = write_lines(tmp_path / name, range(2000), compression=name[-3:].strip("."))
        path.write_bytes(path.read_bytes()[:-200])
        with pytest.raises(DataError, match=name):
            JsonLines(path).open()


def test_the_index_is_built_once_and_again_for_a_changed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    build = jsonl._build
    monkeypatch.setattr(jsonl, "_build", lambda found, cached: (built.append(found.path), build(found, cached))[1])
    path = write_lines(tmp_path / "data" / "rows.jsonl", range(40))
    for _ in range(2):
        assert JsonLines(path, index=tmp_path / "index").open().rows == 40
    assert len(built) == 1
    assert not (tmp_path / "data" / ".headway-index").exists()
    write_lines(path, range(41))
    assert JsonLines(path, index=tmp_path / "index").open().rows == 41
    assert len(built) == 2


def test_processes_that_need_the_index_at_the_same_time_get_the_same(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl.gz", range(3000), compression="gz")
    program = (
        "import sys; from headway.datasets.formats.jsonl import JsonLines; source = JsonLines(sys.argv[1]).open(); "
        "print(source.rows, source.fingerprint)"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    told = [process.communicate()[0].strip() for process in started]
    assert told == [f"3000 {JsonLines(path).open().fingerprint}"] * 2
    assert len(list((tmp_path / ".headway-index").glob("*.npz"))) == 1


def test_a_folder_that_cannot_hold_the_index_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", range(40))
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write the index .*rows.jsonl.* set index to a folder"):
        JsonLines(path, index=tmp_path / "file").open()


def test_a_remote_file_needs_a_local_folder_for_its_index(tmp_path: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe("/lines/rows.jsonl", write_lines(tmp_path / "rows.jsonl", range(40)).read_bytes())
    memory.pipe("/lines/rows.jsonl.gz", write_lines(tmp_path / "z", range(40, 80), compression="gz").read_bytes())
    with pytest.raises(DataError, match="is remote, so its index needs a local folder"):
        JsonLines("memory://lines").open()
    seen = steps(JsonLines("memory://lines", index=tmp_path / "index"))
    assert sorted(row for batch in seen for row in batch) == list(range(80))


def test_lines_that_are_json_only_on_their_own_are_read(tmp_path: Path) -> None:
    """Lines are parsed together, but a byte order mark is JSON only at the start."""
    lines = ['\ufeff{"a": "first"}', '{"a": "\\ud800 \u00e9,]["}\r', "", '\ufeff{"a": [1, "x"]}']
    (tmp_path / "own.jsonl").write_bytes("\n".join(lines).encode())
    assert JsonLines(tmp_path / "own.jsonl").open().fragment(0).read()["a"].tolist() == [
        "first", "\ud800 \u00e9,][", [1, "x"]
    ]  # fmt: skip
