"""Columns of packed rows and padded batches that follow from others, made when batches are handed over."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .packed_rows import DERIVED, PIECES, derive

IGNORED = -100
"""The label of padding: `ignore_index` of `torch.nn.functional.cross_entropy`."""


def empty(shape: tuple[int, ...], dtype: npt.DTypeLike, pin_memory: bool) -> torch.Tensor:
    """Return a tensor on the CPU with any contents."""
    if pin_memory:
        return torch.empty(shape, dtype=torch.from_numpy(np.empty(0, dtype)).dtype, pin_memory=True)
    # Not `torch.empty`, which maps new memory for each batch: that takes longer than copying the rows.
    return torch.from_numpy(np.empty(shape, dtype))


def expand_packed(columns: dict[str, Any], pin_memory: bool) -> dict[str, Any]:
    """Return the columns of packed rows, those that compact rows lack included; any other columns as they are."""
    if PIECES not in columns:
        return columns
    tokens = columns["tokens"]
    derived = {name: empty(tuple(tokens.shape), dtype, pin_memory) for name, dtype in DERIVED.items()}
    derive(columns[PIECES].numpy(), *(each.numpy() for each in derived.values()))
    others = {name: each for name, each in columns.items() if name not in ("tokens", PIECES)}
    return {"tokens": tokens, **derived, **others}


def expand_padded(columns: dict[str, Any]) -> dict[str, Any]:
    """Add what follows from the `tokens` and `lengths` of a padded batch; see `TokenBudget`."""
    tokens, lengths = columns.get("tokens"), columns.get("lengths")
    if not isinstance(tokens, torch.Tensor) or not isinstance(lengths, torch.Tensor) or tokens.ndim != 2:
        return columns  # a transform has made something else of them
    positions = torch.arange(tokens.shape[1], dtype=torch.int32)
    mask = positions < lengths[:, None]
    return {
        "mask": mask,
        "labels": tokens.long().masked_fill_(~mask, IGNORED),
        "positions": positions * mask,
        "document_ids": mask.int() - 1,
        **columns,
    }
