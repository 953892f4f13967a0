"""Columns on their way through Arrow and back: what they hold, and of which kind, stays what it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headway.datasets.collate import to_rows, to_table


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
    """An image of bytes is one of bytes after a transform, whatever the sizes of the others, and its place in them."""
    generator = np.random.default_rng(1)
    sizes = [(4, 5, 3), (2, 7, 3), (1, 1, 3), (4, 5, 3)]
    images = [generator.integers(0, 2 if dtype == "bool" else 200, size[:depth]).astype(dtype) for size in sizes]
    for column in (_column(*images), _column(None, *images, None), _column(images[0], None, images[1])):
        back = to_rows(to_table({"image": column}))["image"]
        assert _same(back, column)
        # And once more: what comes out goes in.
        assert _same(to_rows(to_table({"image": back}))["image"], column)


def test_lists_of_lists_of_several_lengths_keep_their_kind() -> None:
    boxes = _column(np.arange(3, dtype="int16"), np.arange(1, dtype="int16"), np.zeros(0, "int16"))
    column = _column(boxes, boxes[:1], None, _column(None, boxes[0]))
    back = to_rows(to_table({"boxes": column}))["boxes"]
    assert back[0][0].dtype == back[0][2].dtype == back[3][1].dtype == np.int16
    assert [len(each) for each in back[0]] == [3, 1, 0]
    assert back[2] is back[3][0] is None
    assert back[3][1].tolist() == [0, 1, 2]


def test_what_is_no_array_stays_what_it_is() -> None:
    rows = {
        "text": _column("a", None),
        "bytes": _column(b"a", b"bc"),
        "words": _column(_column("a", "b"), _column("c")),
    }
    back = to_rows(to_table(rows))
    assert {name: column.tolist() for name, column in back.items()} == {
        "text": ["a", None],
        "bytes": [b"a", b"bc"],
        "words": [["a", "b"], ["c"]],
    }
