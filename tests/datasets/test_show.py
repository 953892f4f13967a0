"""`headway data show` on formats other than Parquet."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from typer.testing import CliRunner

from headway.datasets.errors import DataError
from headway.datasets.show import describe, read_row
from headway.orchestrator.cli.data import data_app

from .test_webdataset import write_tar


def test_json_lines_are_described(tmp_path: Path) -> None:
    rows = [{"text": f"row {row}", "tokens": [row, row + 1], "n": row} for row in range(30)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = describe(tmp_path, index=tmp_path / "index")
    assert (shown.rows, shown.files, shown.fragments) == (30, 1, 1)
    assert shown.size_bytes == (tmp_path / "a.jsonl").stat().st_size
    assert shown.columns == {"text": "str", "tokens": "int64[2]", "n": "int64"}
    assert shown.first_row == rows[0]
    assert "fragments    1\n  files        1\n" in str(shown)
    assert read_row(tmp_path, "a.jsonl:18", columns=["n"], index=tmp_path / "index") == {"n": 17}
    with pytest.raises(DataError, match="no row 'a.jsonl:31'; the id of its first row is \"a.jsonl:1\""):
        read_row(tmp_path, "a.jsonl:31", index=tmp_path / "index")


def test_lengths_of_texts_and_lists_are_shown(tmp_path: Path) -> None:
    rows = [{"text": "a" * row, "tokens": [1] * (row % 3), "n": row} for row in range(1, 12)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = describe(tmp_path, index=tmp_path / "index")
    assert shown.lengths == {"text": (1, 6, 11), "tokens": (0, 1, 2)}
    assert shown.sampled_rows == 11
    assert "lengths in 11 rows (least, median, greatest)" in str(shown)
    pq.write_table(pa.table({"text": ["ab", None, "abcd"], "n": [1, None, 3]}), tmp_path / "b.parquet")
    assert describe(tmp_path / "b.parquet").lengths == {"text": (2, 3, 4)}


def test_a_damaged_row_group_is_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [str(row) * (row % 50) for row in range(20000)]}), path, row_group_size=1000)
    content = bytearray(path.read_bytes())
    begin = pq.ParquetFile(path).metadata.row_group(10).column(0).dictionary_page_offset
    content[begin : begin + 3000] = bytes(3000)
    path.write_bytes(content)
    shown = describe(path)
    assert (shown.rows, shown.sampled_rows) == (20000, 7000)
    assert f"damaged: cannot read row group 10 of {path}" in str(shown)
    assert shown.lengths["text"][0] == 0


def test_tars_are_described(tmp_path: Path) -> None:
    shown = describe(write_tar(tmp_path / "a.tar", range(12)))
    assert (shown.rows, shown.files) == (12, 1)
    assert shown.columns == {"__key__": "str", "jpg": "bytes", "cls": "int64", "json": "dict"}
    assert shown.first_row["json"] == {"a": [1]}
    assert read_row(tmp_path / "a.tar", "a.tar/./0/007", columns=["cls"]) == {"__key__": "./0/007", "cls": 7}


def test_images_are_described(tmp_path: Path) -> None:
    for name in ("ant", "bee"):
        (tmp_path / name).mkdir()
        Image.fromarray(np.full((2, 3, 3), 9, np.uint8)).save(tmp_path / name / "0.png")
    shown = describe(tmp_path)
    assert (shown.rows, shown.files) == (2, 2)
    assert shown.columns == {"image": "uint8[2, 3, 3]", "label": "int64"}
    assert read_row(tmp_path, "bee/0.png") == {"image": [[[9] * 3] * 3] * 2, "label": 1}


def test_the_command_prints_json_of_any_format(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 5}\n')
    done = CliRunner().invoke(data_app, ["show", str(tmp_path), "--index", str(tmp_path / "index"), "--json"])
    assert done.exit_code == 0, done.output
    shown = json.loads(done.output)
    assert (shown["rows"], shown["first_row"]) == (1, {"n": 5})
    assert not (tmp_path / ".headway-index").exists()
