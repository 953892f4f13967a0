"""Columns keep their values and types through Arrow and back."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from headway.datasets.arrow import Rows, concat, from_table, shaped_bytes, to_rows, to_table
from headway.datasets.errors import DataError
from headway.datasets.row_groups import ReadJob, RowGroup, chunks, read, read_table, transform
from headway.datasets.sources import read_source
from headway.datasets.stream import ParquetStream

from .conftest import shard_info


def _column(*values: Any) -> Any:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def _same(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    one, other = np.asarray(one), np.asarray(other)
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.dtype != object:
        return bool(np.array_equal(one, other))
    return all(_same(*each) for each in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float16", "float32", "float64", "bool"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_arrays_of_several_sizes_keep_their_kind(dtype: str, depth: int) -> None:
    """Images remain uint8 through a transform, whatever the sizes of other images."""
    generator = np.random.default_rng(1)
    sizes = [(4, 5, 3), (2, 7, 3), (1, 1, 3), (4, 5, 3)]
    images = [generator.integers(0, 2 if dtype == "bool" else 200, size[:depth]).astype(dtype) for size in sizes]
    for column in (_column(*images), _column(None, *images, None), _column(images[0], None, images[1])):
        back = from_table(to_table({"image": column}))["image"]
        assert _same(back, column)
        # Again, with the output as input.
        assert _same(from_table(to_table({"image": back}))["image"], column)


def test_lists_of_lists_of_several_lengths_keep_their_kind() -> None:
    boxes = _column(np.arange(3, dtype="int16"), np.arange(1, dtype="int16"), np.zeros(0, "int16"))
    column = _column(boxes, boxes[:1], None, _column(None, boxes[0]))
    back = from_table(to_table({"boxes": column}))["boxes"]
    assert back[0][0].dtype == back[0][2].dtype == back[3][1].dtype == np.int16
    assert [len(each) for each in back[0]] == [3, 1, 0]
    assert back[2] is back[3][0] is None
    assert back[3][1].tolist() == [0, 1, 2]


def test_what_is_no_array_stays_what_it_is() -> None:
    rows = {
        "text": _column("a", None),
        "bytes": _column(b"a", b"bc"),
        "words": _column(["a", "b"], ["c"]),
    }
    back = from_table(to_table(rows))
    assert {name: column.tolist() for name, column in back.items()} == {
        "text": ["a", None],
        "bytes": [b"a", b"bc"],
        "words": [["a", "b"], ["c"]],
    }


_BOXES = pa.list_(pa.list_(pa.float32()))
_WORDS = pa.list_(pa.string())
_TURNS = pa.list_(pa.struct([("role", pa.string()), ("tool", pa.string())]))
_COUNTS = pa.map_(pa.string(), pa.int64())
_BIG = pa.struct([("id", pa.uint64())])
_GROUPS: dict[str, tuple[pa.DataType, list[Any]]] = {
    # Each list is a row group, with values that the others lack.
    "boxes, and a group of none": (_BOXES, [[[[1.0, 2.0]], []], [[], []]]),
    "lists ragged inside": (_BOXES, [[[[1.0, 2.0], [3.0]], [[4.0], [5.0]]], [[[6.0]], [[7.0]]]]),
    "widths that differ": (pa.list_(pa.int16()), [[[1, 2], [3, 4]], [[5], [6]]]),
    "numbers and lists of nothing": (pa.list_(pa.float64()), [[[], []], [[1.5], [2.5, 3.5]]]),
    "a fixed size with nulls": (pa.list_(pa.int32(), 2), [[[1, 2], None], [[3, 4], [5, 6]]]),
    "words, and a group of none": (_WORDS, [[["a"], ["b"]], [[], None]]),
    "turns without the optional field": (
        _TURNS,
        [[[{"role": "u", "tool": None}]] * 2, [[{"role": "u", "tool": "x"}]] * 2],
    ),
    "maps": (_COUNTS, [[[("k", 1)], []], [[("k", 2), ("l", 3)], None]]),
    "numbers above all of int64": (_BIG, [[{"id": 2**63 + 1}] * 2, [{"id": 1}, None]]),
    "days": (pa.date32(), [[datetime.date(2026, 1, 1), None], [None, None]]),
    "bytes that end in zeros": (pa.binary(), [[b"ab\0", b"c"], [b"", None]]),
}


def _write(path: Path, arrow: pa.DataType, groups: list[Any]) -> list[ReadJob]:
    """Write a column "c" with each list as a row group, and return the jobs that read them."""
    with pq.ParquetWriter(path / "a.parquet", pa.schema([("c", arrow)])) as writer:
        for group in groups:
            writer.write_table(pa.table({"c": pa.array(group, arrow)}))
    file = read_source(path).files[0]
    return [
        ReadJob(RowGroup(file.path, file.digest, index, len(group), ("c",)), None, ((0, len(group)),))
        for index, group in enumerate(groups)
    ]


def _known(value: Any) -> Any:
    """Return a value with its type, in a comparable form."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, [_known(each) for each in value]
    return type(value), value


def _rows(*pieces: Rows) -> list[Any]:
    return [_known(row) for piece in pieces for row in piece["c"]]


def _keep(rows: Rows) -> Rows:
    return rows


@pytest.mark.parametrize("kind", _GROUPS)
def test_a_column_is_the_same_through_ray_and_through_transforms(tmp_path: Path, kind: str) -> None:
    """Compares reading here, in a Ray Data task with several row groups, and through transforms."""
    jobs = _write(tmp_path, *_GROUPS[kind])
    here = _rows(*map(read, jobs))
    assert len(here) == 4
    assert _rows(*chunks(read_table(jobs))) == here
    assert _rows(*(read(job, [_keep, _keep]) for job in jobs)) == here
    sent = concat([transform(rows, [_keep]) for rows in chunks(read_table(jobs))])
    assert _rows(*chunks(sent)) == here


@pytest.mark.parametrize(
    ("arrow", "rows", "expected"),
    [
        (_BOXES, [[[1, 2]], [], [[3, 4], [5, 6]], []], ([[1, 2]], [], [[3, 4], [5, 6]], [])),
        (_BOXES, [[[1, 2], [3]], [[4]], [], [[5], [6, 7]]], ([[1, 2], [3]], [[4]], [], [[5], [6, 7]])),
        (_BOXES, [[], [], [], []], [[], [], [], []]),
        (pa.list_(pa.float32()), [None, [1, 2], None, None], (None, [1, 2], None, None)),
        (pa.list_(pa.float32()), [[1, 2], [], [3], [4]], ([1, 2], [], [3], [4])),
        (pa.list_(pa.float32()), [[1, 2], [3, 4], [5, 6], [7, 8]], [[1, 2], [3, 4], [5, 6], [7, 8]]),
        (pa.list_view(pa.float32()), [[1, 2], [3, 4], [5, 6], [7, 8]], [[1, 2], [3, 4], [5, 6], [7, 8]]),
        (pa.large_list_view(pa.float32()), [[1], [], [2, 3], [4]], ([1], [], [2, 3], [4])),
    ],
)
def test_lists_of_numbers_are_tensors_however_ragged(tmp_path: Path, arrow: Any, rows: Any, expected: Any) -> None:
    """One tensor if all rows have one shape, here as a list; else lists of tensors, here as a tuple of rows."""
    _write(tmp_path, arrow, [rows])
    stream = ParquetStream(tmp_path, engine="threads", shuffle=False, shards=1)
    stream.setup(shard_info(global_batch_size=4))
    column = next(iter(stream.epoch(0))).micro_batches[0]["c"]
    stream.close()

    def lists(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            assert value.dtype == torch.float32
            return value.tolist()
        return value if value is None else [lists(each) for each in value]

    assert isinstance(column, torch.Tensor) == isinstance(expected, list)
    assert lists(column) == list(expected)


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(DataError, match="column 'f' holds function, which cannot be sent to another process"):
        to_table({"f": _column(lambda: None)})


class _Bomb:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path(os.environ["HEADWAY_BOMB"]),))


def test_a_file_cannot_have_its_reader_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column in the format used between Headway's processes is ordinary data."""
    monkeypatch.setenv("HEADWAY_BOMB", str(tmp_path / "went-off"))
    looks_like_ours = to_table({"text": np.array([_Bomb()], dtype=object)})
    pq.write_table(looks_like_ours, tmp_path / "a.parquet")
    rows = to_rows(pq.read_table(tmp_path / "a.parquet"))
    assert isinstance(rows["text"][0], dict)
    sent = from_table(to_table(rows))
    assert not (tmp_path / "went-off").exists()
    assert sent["text"][0] == rows["text"][0]
    from_table(looks_like_ours)
    assert (tmp_path / "went-off").exists(), "or the test shows nothing"


@pytest.mark.parametrize("shape", [(4, 3, 2), (5,), ()])
def test_arrays_of_bytes_keep_their_shape_in_a_file(tmp_path: Path, shape: tuple[int, ...]) -> None:
    arrays = np.random.default_rng(0).integers(0, 256, (7, *shape), dtype=np.uint8)
    field, column = shaped_bytes("image", arrays)
    table = pa.table([column, pa.array(range(7))], schema=pa.schema([field, pa.field("label", pa.int64())]))
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    rows = read_source(str(tmp_path / "a.parquet")).fragment(1).read()
    np.testing.assert_array_equal(rows["image"], arrays[4:])
    np.testing.assert_array_equal(to_rows(table.slice(2, 3))["image"], arrays[2:5])
    # A program that does not know of it gets bytes.
    assert pq.read_table(tmp_path / "a.parquet")["image"].to_pylist()[6] == arrays[6].tobytes()


@pytest.mark.parametrize(
    "column",
    [
        pa.array([b"123456", None], pa.binary(6)),
        pa.array([b"12345"], pa.binary(5)),
        pa.array([b"123456"], pa.binary()),
        pa.array([6]),
    ],
)
def test_bytes_of_another_shape_are_refused(column: pa.Array) -> None:
    field = pa.field("image", column.type, metadata={b"headway.shape": "[2, 3]"})
    with pytest.raises(DataError, match=r"column 'image' has nulls, or is no bytes of the shape \[2, 3\]: it is "):
        to_rows(pa.table([column], schema=pa.schema([field])))


def test_dates_that_python_cannot_hold_are_named(tmp_path: Path) -> None:
    _write(tmp_path, pa.timestamp("ms"), [[-(10**18), 0]])
    stream = ParquetStream(tmp_path, engine="threads", shards=1)
    stream.setup(shard_info(global_batch_size=2))
    with pytest.raises(DataError, match=r"column 'c' \(timestamp\[ms\]\) has values that Python has no objects for"):
        next(iter(stream.epoch(0)))
    stream.close()
