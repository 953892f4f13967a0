"""Values that a transform may return, and their conversion: numbers, text and objects of each row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from headway.datasets.arrow import Rows, concat
from headway.datasets.errors import DataError
from headway.datasets.row_groups import ReadJob, RowGroup, read, transform
from headway.datasets.transforms import name_of

ROWS = {"x": np.arange(2)}


def returned(values: Any) -> Any:
    """Return a column after a transform returned it."""
    return transform(ROWS, [lambda rows: {"c": values}])["c"]


@pytest.mark.parametrize(
    "values",
    [
        [b"ab\0", b"c"],
        ["text\0", "longer text"],
        [["a\0", "bb"], ["c", "d"]],
        [["a"], []],
        ["x", None],
        [{"a": 1}, {"b": [2]}],
        [(1, "a"), (2, "b")],
        [2**70, 1],
        [1, "a"],
        [1, b"a\0"],
        [[1, "a"], [2, "b"]],
    ],
)
def test_what_is_no_number_stays_what_it_is(values: list[Any]) -> None:
    for given in (values, np.array([*values, None], dtype=object)[:2]):
        column = returned(given)
        assert column.dtype == object
        assert column.tolist() == values
        assert [type(each) for each in column] == [type(each) for each in values]


def test_one_long_text_does_not_widen_the_others() -> None:
    rows = {"x": np.arange(1000)}
    texts = ["a" * 10**6, *["b"] * 999]  # 4 GB as a NumPy string array
    column = transform(rows, [lambda rows: {"c": texts}])["c"]
    assert column.dtype == object
    assert column.tolist() == texts
    assert returned(np.array(["a", "bc"])).tolist() == ["a", "bc"]
    assert type(returned(np.array(["a", "bc"]))[0]) is str


@pytest.mark.parametrize(
    ("values", "dtype", "shape"),
    [
        ([1, 2], "int64", (2,)),
        ([1.5, np.float64(2)], "float64", (2,)),
        ([[1, 2], [3, 4]], "int64", (2, 2)),
        ([np.zeros((3, 2), "uint8"), np.ones((3, 2), "uint8")], "uint8", (2, 3, 2)),
        (torch.zeros(2, 3), "float32", (2, 3)),
        ([torch.zeros(3), torch.ones(3)], "float32", (2, 3)),
    ],
)
def test_rows_of_one_shape_are_one_array(values: Any, dtype: str, shape: tuple[int, ...]) -> None:
    column = returned(values)
    assert (column.dtype, column.shape) == (np.dtype(dtype), shape)
    assert np.array_equal(column, np.asarray([np.asarray(each) for each in values]))


@pytest.mark.parametrize(
    ("values", "shapes", "dtype"),
    [
        ([torch.zeros(3), torch.zeros(1)], [(3,), (1,)], "float32"),
        ([np.zeros((3, 4, 5), "uint8"), np.zeros((3, 2, 5), "uint8")], [(3, 4, 5), (3, 2, 5)], "uint8"),
        ([np.zeros((0, 4), "float32"), np.ones((2, 4), "float32")], [(0, 4), (2, 4)], "float32"),
        ([[], [7, 8]], [(0,), (2,)], "int64"),
        ([[1, 2], [3]], [(2,), (1,)], "int64"),
        (np.zeros((2, 0), "float32"), [(0,), (0,)], "float32"),
    ],
)
def test_rows_of_several_shapes_are_an_array_each(values: Any, shapes: list[tuple[int, ...]], dtype: str) -> None:
    column = returned(values)
    assert [(each.dtype, each.shape) for each in column] == [(np.dtype(dtype), shape) for shape in shapes]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, None], "the transform .*<lambda> returned None among the numbers of 'c'"),
        ([torch.zeros(1, dtype=torch.bfloat16)] * 2, "the transform .*<lambda> returned a list as 'c'.*BFloat16"),
        (
            [lambda: 0, lambda: 1],
            "the transform .*<lambda> returned invalid rows: column 'c' holds function, which cannot be",
        ),
    ],
)
def test_what_cannot_go_on_names_the_transform_and_the_column(values: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        returned(values)


def test_columns_that_come_and_go_are_refused_between_row_groups() -> None:
    with pytest.raises(DataError, match=r"some rows have the columns \['x'\] and others \['x', 'y'\]"):
        concat([ROWS, {**ROWS, "y": np.arange(2)}])


def test_a_transform_may_work_in_place_wherever_its_rows_lie() -> None:
    """Unpermuted rows of a file, of an earlier transform, and of a block shared by Ray are read-only."""
    shared = np.arange(4.0)
    shared.flags.writeable = False

    def halve(rows: Rows) -> Rows:
        rows["x"] /= 2
        return rows

    assert transform({"x": shared}, [halve, halve])["x"].tolist() == [0, 0.25, 0.5, 0.75]
    assert shared.tolist() == [0, 1, 2, 3]


def test_an_error_names_the_row_its_row_group_and_the_file(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"x": range(20)}), file, row_group_size=10)

    def fails(rows: Rows) -> Rows:
        if (rows["x"] == 13).any():
            raise KeyError("thirteen")
        return rows

    for order in (None, (1, 2, 3)):
        job = ReadJob(RowGroup(str(file), "", 1, 10, ("x",)), order, ((0, 4), (4, 10)))
        with pytest.raises(KeyError, match="thirteen") as raised:
            read(job, [fails])
        assert raised.value.__notes__ == [
            f"raised by the transform {name_of(fails)} for row 3 of row group 1 of {file}"
        ]
