"""Nested batches: of any kind, they stay what they are."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from types import MappingProxyType
from typing import Any

import pytest
import torch

from headway.trainer.nested import batch_size, map_tensors, move

Pair = namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    name: str
    length: int = dataclasses.field(init=False, default=3)


class Encoding(UserDict[str, Any]):
    """As that of Hugging Face: it has more to its constructor, and an attribute that is not in it."""

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
    ],
)
def test_rows_are_those_of_the_first_tensor_that_has_any(nested: Any, rows: int) -> None:
    assert batch_size(nested) == rows
