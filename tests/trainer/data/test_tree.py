"""Nested batches of any kind keep their types."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from headway.trainer.data.tree import average_records, batch_size, map_tensors, move

Pair = namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    name: str
    length: int = dataclasses.field(init=False, default=3)


class Encoding(UserDict[str, Any]):
    """Like Hugging Face's BatchEncoding: more constructor arguments, and an attribute outside of the data."""

    def __init__(self, data: dict[str, Any], kind: str = "none") -> None:
        super().__init__(data)
        self.kind = kind


ONE, TWO = torch.ones(3, 2), torch.ones(3)


@pytest.mark.parametrize(
    "nested",
    [
        ONE,
        {"x": ONE, "y": {"z": TWO, "name": "a"}},
        [ONE, (TWO, "text", None, 5)],
        Pair(ONE, TWO),
        OrderedDict(x=ONE),
        defaultdict(list, x=ONE),
        MappingProxyType({"x": ONE}),
        Encoding({"x": ONE}, kind="tokens"),
        Batch(ONE, "a"),
    ],
    ids=lambda nested: type(nested).__name__,
)
def test_tensors_change_and_the_rest_stays(nested: Any) -> None:
    doubled = map_tensors(lambda tensor: tensor * 2, nested)
    assert type(doubled) is type(nested)
    assert batch_size(doubled) == batch_size(nested) == 3
    assert ONE.sum() == 6, "what was given is not touched"
    if isinstance(nested, Encoding):
        assert doubled.kind == "tokens"
    if isinstance(nested, Batch):
        assert (doubled.name, doubled.length) == ("a", 3)
        assert doubled.x.sum() == 12
    if isinstance(nested, defaultdict):
        assert doubled["new"] == []
    moved = move(nested, torch.device("meta"))
    found: list[torch.Tensor] = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, moved)  # type: ignore[func-returns-value]
    assert found
    assert all(tensor.is_meta for tensor in found)


@pytest.mark.parametrize(
    ("nested", "rows"),
    [
        ({"step": torch.tensor(4), "x": torch.zeros(5, 2)}, 5),
        (["a", "b"], 1),
        (torch.tensor(3.0), 1),
        ({}, 1),
        ((), 1),
        (None, 1),
        ([{"mask": torch.zeros(0)}], 0),
        ({"scale": np.array(2.0), "x": np.zeros((7, 2))}, 7),
    ],
)
def test_rows_are_those_of_the_first_tensor_that_has_any(nested: Any, rows: int) -> None:
    assert batch_size(nested) == rows


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: torch.Tensor
    inner: Pair


def test_kinds_that_are_hard_to_make_stay_what_they_are() -> None:
    nested = Slotted(ONE, Pair(torch.Size([2, 3]), {"a": (TWO, np.ones(2))}))
    doubled = map_tensors(lambda tensor: tensor * 2, nested)
    assert type(doubled) is Slotted
    assert doubled.inner.x == torch.Size([2, 3])
    assert doubled.x.sum() == 12
    assert doubled.inner.y["a"][0].sum() == 6
    assert doubled.inner.y["a"][1] is nested.inner.y["a"][1]
    largest = map_tensors(lambda tensor: tensor + 1, torch.tensor([1.0, 5.0]).max(0))
    assert type(largest) is torch.return_types.max
    assert largest.values == 6


def test_records_are_averaged_by_weight_nested_and_with_keys_missing() -> None:
    records = [
        {"loss": 1.0, "top": {"1": torch.tensor(0.5), "5": 1}, "name": "cat", "only": np.float32(3.0)},
        {"loss": torch.tensor([4.0]), "top": {"1": 2.0}, "name": "dog", "shape": torch.ones(2)},
        {},
    ]
    assert average_records(records, weights=[2, 1, 7]) == {"loss": 2.0, "top": {"1": 1.0, "5": 1.0}, "only": 3.0}
    assert average_records(records)["loss"] == 2.5
    assert average_records([]) == {}
    assert average_records([{"a": 0.9}] * 3, weights=[0.1, 7, 2]) == {"a": 0.9}
    assert records[0]["name"] == "cat"


def test_nan_in_a_record_is_in_the_mean_unless_it_is_excluded() -> None:
    records = [{"a": 1.0, "b": math.nan}, {"a": math.nan, "b": math.nan}, {"a": 4.0}]
    assert math.isnan(average_records(records)["a"])
    means = average_records(records, weights=[1, 5, 2], exclude_nan=True)
    assert means["a"] == 3.0
    assert math.isnan(means["b"])
    assert average_records(records, weights=[1, 0, 2])["a"] == 3.0


def test_records_that_cannot_be_averaged_are_refused() -> None:
    with pytest.raises(ValueError, match="one entry per record: got 1 for 2 records"):
        average_records([{}, {}], weights=[1.0])
    with pytest.raises(ValueError, match="'top' is a dict in some records and a number in others"):
        average_records([{"top": 1.0}, {"top": {"1": 2.0}}])
