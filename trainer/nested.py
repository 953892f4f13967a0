"""Nested batches: tensors inside dicts, lists, tuples, named tuples and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], nested: Any) -> Any:
    """Applies a function to every tensor of a nested batch and returns a new one; what is no tensor stays as it is."""
    if isinstance(nested, torch.Tensor):
        return function(nested)
    if isinstance(nested, Mapping):
        mapped = {key: map_tensors(function, value) for key, value in nested.items()}
        if type(nested) is dict:
            return mapped
        if isinstance(nested, MutableMapping):
            # A copy, for what a constructor cannot be told: Hugging Face's BatchEncoding, a defaultdict's default.
            clone = copy.copy(nested)
            clone.update(mapped)
            return clone
        return type(nested)(mapped)  # type: ignore[call-arg]
    if isinstance(nested, tuple) and hasattr(nested, "_fields"):
        return type(nested)(*(map_tensors(function, value) for value in nested))
    if isinstance(nested, (list, tuple)):
        return type(nested)(map_tensors(function, value) for value in nested)
    if dataclasses.is_dataclass(nested) and not isinstance(nested, type):
        moved = copy.copy(nested)
        for each in dataclasses.fields(nested):
            # As a frozen dataclass sets its fields; `dataclasses.replace` refuses those that are not for `__init__`.
            object.__setattr__(moved, each.name, map_tensors(function, getattr(nested, each.name)))
        return moved
    return nested


def move(nested: Any, device: torch.device) -> Any:
    """Copies the tensors of a nested batch to a device, without waiting where the host memory is pinned."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), nested)


def batch_size(nested: Any) -> int:
    """Rows of a batch: the first dimension of its first tensor that has one; 1 where there is none."""
    return next((tensor.shape[0] for tensor in _tensors(nested) if tensor.dim() > 0), 1)


def _tensors(nested: Any) -> Iterator[torch.Tensor]:
    if isinstance(nested, torch.Tensor):
        yield nested
    elif isinstance(nested, Mapping):
        for value in nested.values():
            yield from _tensors(value)
    elif isinstance(nested, (list, tuple)):
        for value in nested:
            yield from _tensors(value)
    elif dataclasses.is_dataclass(nested) and not isinstance(nested, type):
        for each in dataclasses.fields(nested):
            yield from _tensors(getattr(nested, each.name))
