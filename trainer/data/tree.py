"""Nested structures: batches of tensors in dicts, lists, tuples, named tuples and dataclasses; records of numbers."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch

from ..metrics.means import clamp


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], nested: Any) -> Any:
    """Apply a function to every tensor of a nested batch and return the results in the same structure.

    Args:
        function: called with each tensor.
        nested: dicts and other mappings, lists, tuples, named tuples and dataclasses (also frozen) of any depth. Not
            modified; other leaves are kept.

    Example:
        >>> map_tensors(torch.Tensor.half, {"image": torch.ones(2), "labels": [torch.ones(1)], "name": "cat"})
        {'image': tensor([1., 1.], dtype=torch.float16), 'labels': [tensor([1.], dtype=torch.float16)], 'name': 'cat'}
    """
    if isinstance(nested, torch.Tensor):
        return function(nested)
    if isinstance(nested, Mapping):
        mapped = {key: map_tensors(function, value) for key, value in nested.items()}
        if type(nested) is dict:
            return mapped
        if isinstance(nested, MutableMapping):
            # A copy keeps what a constructor would lose: Hugging Face's BatchEncoding, a defaultdict's default.
            clone = copy.copy(nested)
            clone.update(mapped)
            return clone
        return type(nested)(mapped)  # type: ignore[call-arg]
    if isinstance(nested, tuple) and hasattr(nested, "_fields"):
        return type(nested)(*(map_tensors(function, value) for value in nested))
    if isinstance(nested, (list, tuple)):
        return type(nested)([map_tensors(function, value) for value in nested])  # torch.Size takes no generator
    if dataclasses.is_dataclass(nested) and not isinstance(nested, type):
        moved = copy.copy(nested)
        for each in dataclasses.fields(nested):
            # Works on frozen dataclasses; `dataclasses.replace` refuses fields with init=False.
            object.__setattr__(moved, each.name, map_tensors(function, getattr(nested, each.name)))
        return moved
    return nested


def move(nested: Any, device: torch.device) -> Any:
    """Copy the tensors of a nested batch to a device, asynchronously from pinned memory."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), nested)


def average_records(
    records: Sequence[Mapping[str, Any]], weights: Sequence[float] | None = None, *, exclude_nan: bool = False
) -> dict[str, Any]:
    """Return the weighted mean of every number in some records, nested as they are.

    A number that only some records have is averaged over those records. Other values, such as text, are left out.

    Args:
        records: numbers, or tensors of one element, by name, possibly in nested dicts; reading a tensor waits for its
            device.
        weights: weight of each record, such as its number of samples; equal by default.
        exclude_nan: whether to leave NaN out of means; a mean of only NaN is still NaN.

    Raises:
        ValueError: the numbers of weights and records differ, or a name is a number in one record and a dict in
            another.

    Example:
        >>> average_records([{"loss": 1.0, "top": {"1": 0.5}}, {"loss": 4.0, "name": "b"}], weights=[2, 1])
        {'loss': 2.0, 'top': {'1': 0.5}}
    """
    if weights is not None and len(weights) != len(records):
        raise ValueError(f"weights must have one entry per record: got {len(weights)} for {len(records)} records")
    found: dict[str, list[tuple[Any, float]]] = {}
    for record, weight in zip(records, weights or [1.0] * len(records), strict=True):
        for name, value in record.items():
            if _is_number(value) or isinstance(value, Mapping):
                found.setdefault(name, []).append((value, weight))
    means: dict[str, Any] = {}
    for name, each in found.items():
        dicts = [(value, weight) for value, weight in each if isinstance(value, Mapping)]
        if dicts and len(dicts) < len(each):
            raise ValueError(f"{name!r} is a dict in some records and a number in others: use different names")
        if dicts:
            means[name] = average_records(*zip(*dicts, strict=True), exclude_nan=exclude_nan)
            continue
        numbers = [(float(value), weight) for value, weight in each]
        counted = [(value, weight) for value, weight in numbers if weight and not (exclude_nan and math.isnan(value))]
        if total := sum(weight for _, weight in counted):
            values = [value for value, _ in counted]
            means[name] = clamp(sum(value * weight for value, weight in counted) / total, min(values), max(values))
        else:
            means[name] = math.nan
    return means


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, (Real, np.number, np.bool_))


def batch_size(nested: Any) -> int:
    """Return the rows of a batch: the first dimension of its first tensor or array that has one; 1 without any."""
    rows = _rows(nested)
    return 1 if rows is None else rows


def _rows(nested: Any) -> int | None:
    if isinstance(nested, (torch.Tensor, np.ndarray)):
        return nested.shape[0] if nested.ndim else None
    values: Iterable[Any] = ()
    if isinstance(nested, (list, tuple)):
        values = nested
    elif isinstance(nested, Mapping):
        values = nested.values()
    elif dataclasses.is_dataclass(nested) and not isinstance(nested, type):
        values = (getattr(nested, each.name) for each in dataclasses.fields(nested))
    for value in values:
        if (rows := _rows(value)) is not None:
            return rows
    return None
