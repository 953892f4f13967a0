"""Histograms of tensors over all ranks, in which each element counts once, however it is sharded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from ..distributed.dtensor import to_local
from ..distributed.world import World


@dataclass(frozen=True, slots=True)
class Histogram:
    """The finite values of a tensor in bins of equal width.

    Attributes:
        edges: edges of the bins, ascending; one more than there are bins.
        counts: number of values in each bin.
        total: sum of the values.
        total_of_squares: sum of their squares.
        non_finite: number of NaN and infinite values, which are in no bin and no sum.

    Example:
        >>> histograms({"a": torch.tensor([0.0, 1.0, 1.0])}, World.single("cpu"), bins=2)["a"].counts
        (1, 2)
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    total: float
    total_of_squares: float
    non_finite: int = 0


def histograms(tensors: Mapping[str, torch.Tensor], world: World, *, bins: int = 64) -> dict[str, Histogram]:
    """Return a histogram of each tensor, equal on every rank. Every rank must call this, with the same names.

    Waits for the device. Empty tensors are left out.

    Args:
        tensors: tensors by name; a `DTensor` if sharded, otherwise equal on all ranks.
        world: the ranks.
        bins: number of bins of equal width, from the minimum to the maximum finite value.
    """
    parts = {name: _counted_here(tensor.detach(), world) for name, tensor in tensors.items()}
    finite = {name: part[part.isfinite()] for name, part in parts.items()}
    own = {name: (float(part.min()), float(part.max())) for name, part in finite.items() if part.numel()}
    spans = world.all_gather_object(own)
    edges = {name: _edges([span[name] for span in spans if name in span], bins) for name in tensors}
    dtype = torch.float32 if world.device.type == "mps" else torch.float64
    rows = [
        torch.cat([_count(finite[name], edges[name]).to(dtype), _sums(finite[name], part).to(dtype)])
        for name, part in parts.items()
    ]
    if not rows:
        return {}
    totals = world.all_reduce_sum(torch.stack(rows).to(world.device)).tolist()
    return {
        name: Histogram(edges[name], tuple(int(each) for each in row[:bins]), row[bins], row[bins + 1], int(row[-1]))
        for name, row in zip(parts, totals, strict=True)
        if sum(row[:bins]) or row[-1]
    }


def _counted_here(tensor: torch.Tensor, world: World) -> torch.Tensor:
    """Return the values that this rank counts and no other does, flat, at least in float32."""
    part = to_local(tensor)
    if isinstance(tensor, DTensor):
        coordinate = tensor.device_mesh.get_coordinate() or ()
        # With tensor parallelism, several groups of ranks may have the same tensor.
        counts = int(tensor.device_mesh.mesh.min()) == 0 and all(
            place == 0
            for place, placement in zip(coordinate, tensor.placements, strict=True)
            if placement.is_replicate()
        )
    else:
        counts = world.is_main
    part = part.flatten() if counts else part.flatten()[:0]
    return part.to(torch.promote_types(part.dtype, torch.float32))


def _edges(spans: list[tuple[float, float]], bins: int) -> tuple[float, ...]:
    least, greatest = min((low for low, _ in spans), default=0.0), max((high for _, high in spans), default=0.0)
    if least == greatest:
        # Bins need a width, relative to the value: a fixed one would vanish beside a large value.
        width = max(abs(least) * 1e-3, 1e-6)
        least, greatest = least - width, greatest + width
    return tuple(least + (greatest - least) * (number / bins) for number in range(bins + 1))


def _count(values: torch.Tensor, edges: tuple[float, ...]) -> torch.Tensor:
    # Not torch.histc, which has no deterministic CUDA kernel.
    bins = len(edges) - 1
    place = ((values - edges[0]) * (bins / (edges[-1] - edges[0]))).long().clamp_(0, bins - 1)
    return torch.bincount(place, minlength=bins)


def _sums(finite: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    wide = finite if finite.device.type == "mps" else finite.double()
    lost = torch.tensor(part.numel() - finite.numel(), dtype=wide.dtype, device=wide.device)
    return torch.stack([wide.sum(), wide.square().sum(), lost])
