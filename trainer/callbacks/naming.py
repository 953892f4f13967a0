"""Names of callbacks and trackers in a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def key_by_class(objects: Sequence[T]) -> dict[str, T]:
    """Key each object by its class and its index within that class: "EMA/0", "EMA/1", "Timer/0"."""
    count: Counter[str] = Counter()
    keyed: dict[str, T] = {}
    for each in objects:
        name = type(each).__qualname__
        keyed[f"{name}/{count[name]}"] = each
        count[name] += 1
    return keyed
