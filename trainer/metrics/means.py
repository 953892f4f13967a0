"""Weighted means that stay on the device and are reduced over the ranks once, when they are read."""

from __future__ import annotations

import functools
import math
import numbers
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..distributed.world import World
from ..errors import StepError
from .reductions import Reduce, Reductions, to_float64

_FOLD_AT = 1024
"""Values of one name to keep on a device before they are summed, which bounds the memory without waiting."""


class MeanMetrics:
    """Means of step results over micro-batches and ranks, weighted by samples or tokens.

    `add` never waits for a device; only `read` waits, for the device and the other ranks. A mean is
    `sum(weight * value) / sum(weight)`, summed in float64 (float32 on devices without float64) and clamped to the range
    of its values, so that the mean of a constant is the constant. A name may be missing on some ranks or in some
    micro-batches; its mean is over the others.

    Attributes:
        reduced: logged sums, extremes and last values, which `read` also returns.
        weights: total weight of each mean of the last read, over all ranks.

    Example:
        >>> metrics = MeanMetrics()
        >>> metrics.add({"loss": torch.tensor(2.0)}, weight=3)
        >>> metrics.add({"loss": 6.0}, weight=1)
        >>> metrics.read(World.single("cpu"))
        {'loss': 3.0}
    """

    def __init__(self) -> None:
        # By name: the sum of weight * value, the sum of weight, the minimum and the maximum value.
        self._sums: defaultdict[str, list[float]] = defaultdict(_empty_sums)
        self._on_device: defaultdict[str, list[tuple[Tensor, Tensor | float]]] = defaultdict(list)
        self._folded: list[tuple[str, Tensor]] = []
        self._known_names: list[str] = []
        # By the names of means and of their total weights: the sums of weight * value and of weight, shape [2, G].
        self._groups: dict[tuple[tuple[str, ...], tuple[str, ...]], Tensor] = {}
        self.reduced = Reductions()
        self.weights: dict[str, float] = {}

    def add(self, outputs: Mapping[str, Any], weight: Tensor | float = 1, prefix: str = "") -> None:
        """Add the numbers of one micro-batch of this rank; nested names become "a/b".

        Args:
            outputs: numbers and tensors of one element on any device, in nested mappings. Tensors are detached.
            weight: >= 0, such as the number of samples or tokens; a number or a tensor of one element. Values of
                weight 0 are ignored, even NaN.
            prefix: prepended to every name.

        Raises:
            StepError: a value is not a single number.
        """
        if isinstance(weight, Tensor) and weight.is_cpu:
            weight = weight.item()
        for key, value in outputs.items():
            name = prefix + key
            if isinstance(value, Tensor):
                if value.numel() != 1:
                    raise not_a_number_error(name, value)
                if not value.is_cpu:
                    self._keep(name, value, weight)
                    continue
                value = value.item()
            elif not isinstance(value, (float, int)):
                if isinstance(value, Mapping):
                    self.add(value, weight, f"{name}/")
                    continue
                if not isinstance(value, numbers.Real):  # NumPy scalars are
                    raise not_a_number_error(name, value)
            if isinstance(weight, Tensor):
                self._keep(name, to_float64(float(value), weight.device), weight)
            elif weight:
                value, sums = float(value), self._sums[name]
                sums[0] += weight * value
                sums[1] += weight
                if value < sums[2]:
                    sums[2] = value
                if value > sums[3]:
                    sums[3] = value

    def log(self, name: str, value: Any, weight: Tensor | float, reduce: Reduce) -> None:
        """Add one number, to be reduced by `reduce`; only means have a weight.

        Raises:
            StepError: the value is not a single number, or `reduce` is unknown or differs from earlier calls.
        """
        if reduce == "mean":
            self.add({name: value}, weight)
            return
        if isinstance(weight, Tensor) or weight != 1:
            raise StepError(f"log({name!r}): weight requires reduce='mean', got reduce={reduce!r}")
        self._log_reduced(name, value, reduce)

    def add_groups(self, sums_2G: Tensor, means: Sequence[str], totals: Sequence[str]) -> None:
        """Add many means that belong together, and their total weights as sums; never waits for the device.

        Args:
            sums_2G: the sums of weight * value and of weight in each group, as `group_sums` returns them.
            means: the name of the mean of each group.
            totals: the name of the total weight of each group.

        Raises:
            StepError: a total is also logged as something else than a sum.
        """
        for name in totals:
            self.reduced.check_kind(name, "sum")
        key = tuple(means), tuple(totals)
        self._groups[key] = self._groups[key] + sums_2G if key in self._groups else sums_2G

    def read(self, world: World) -> dict[str, float]:
        """Return the means since the last read, sorted by name and equal on every rank, and reset.

        Every rank must call this; it waits for the device. Names of total weight 0 are left out.
        """
        sums, reduced = self._drain(), self.reduced.drain()
        if world.size == 1:
            self._known_names = sorted(sums)
            total, num_reduced = [sums[name] for name in self._known_names], len(reduced)
        else:
            total, num_unknown, num_reduced = self._merge_ranks(sums, world, num_reduced=len(reduced))
            if num_unknown:
                # Names change rarely, mostly at the first read. All ranks see the same count, so all take this branch.
                self._known_names = sorted(
                    {name for names in world.all_gather_object([*self._known_names, *sums]) for name in names}
                )
                total, _, _ = self._merge_ranks(sums, world)
        self.weights = {name: each[1] for name, each in zip(self._known_names, total, strict=True) if each[1]}
        means = {
            name: clamp(weighted / weight, least, greatest)
            for name, (weighted, weight, least, greatest) in zip(self._known_names, total, strict=True)
            if weight
        }
        if not num_reduced and not self.reduced.kinds:
            return means
        per_rank = world.all_gather_object(reduced) if num_reduced else []
        return dict(sorted((means | self.reduced.merge_ranks(per_rank, means)).items()))

    def merge(self, other: MeanMetrics) -> None:
        """Add all values of another `MeanMetrics`; never waits for a device."""
        for name, sums in other._sums.items():
            self._sums[name] = _merge(self._sums[name], sums)
        for name, kept in other._on_device.items():
            self._on_device[name] += kept
            if len(self._on_device[name]) >= _FOLD_AT:
                self._fold(name)
        self._folded += other._folded
        for (means, totals), sums_2G in other._groups.items():
            self.add_groups(sums_2G, means, totals)
        if other.reduced.values:
            self.reduced.merge(other.reduced)

    @property
    def has_values(self) -> bool:
        """Whether anything was added since the last read."""
        return bool(self._sums or self._on_device or self._folded or self._groups or self.reduced.values)

    def names(self) -> set[str]:
        """Return the names of the values since the last read."""
        grouped = (name for means, totals in self._groups for name in (*means, *totals))
        return {*self._sums, *self._on_device, *(name for name, _ in self._folded), *grouped, *self.reduced.values}

    def reset(self) -> None:
        """Drop everything since the last read."""
        self._sums.clear()
        self._on_device.clear()
        self._folded.clear()
        self._groups.clear()
        self.reduced.values.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank has added since the last read."""
        sums = self._drain()
        self._sums.update(sums)
        return {
            # The same key as in exact mode, so that a run may resume from either.
            "sums": {name: list(each[:2]) for name, each in sums.items()},
            "extremes": {name: list(each[2:]) for name, each in sums.items()},
            "reduced": self.reduced.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore a state, also one saved in exact mode, and drop everything else."""
        self.reset()
        extremes = state_dict.get("extremes", {})  # exact mode has none
        for name, sums in state_dict["sums"].items():
            self._sums[name] = [*sums, *extremes.get(name, (-math.inf, math.inf))]
        self.reduced.load_state_dict(state_dict["reduced"])

    def add_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Add the state of a rank that no longer exists."""
        merged = type(self)()
        merged.load_state_dict(state_dict)
        # In this order, so that for "last" this rank's value wins.
        merged.merge(self)
        self.load_state_dict(merged.state_dict())

    def _log_reduced(self, name: str, value: Any, reduce: Reduce) -> None:
        self.reduced.add(name, value, reduce)

    def _keep(self, name: str, value: Tensor, weight: Tensor | float) -> None:
        """Keep a copy of a value on its device: it may change in place, or be written by the next CUDA graph."""
        kept = self._on_device[name]
        kept.append((value.detach().clone(), weight))
        if len(kept) >= _FOLD_AT:
            self._fold(name)

    def _fold(self, name: str) -> None:
        """Replace the kept values of a name by their sums and extremes."""
        kept = self._on_device.pop(name)
        device = kept[0][0].device
        value_N = torch.stack([to_float64(value, device) for value, _ in kept])
        if any(isinstance(weight, Tensor) for _, weight in kept):
            weight_N = torch.stack([to_float64(weight, device) for _, weight in kept])
        else:
            weight_N = torch.tensor([weight for _, weight in kept], dtype=value_N.dtype).to(device, non_blocking=True)
        ignored_N = weight_N == 0
        weighted_N = torch.where(ignored_N, 0, value_N * weight_N)
        least = torch.where(ignored_N, math.inf, value_N).amin()
        greatest = torch.where(ignored_N, -math.inf, value_N).amax()
        self._folded.append((name, torch.stack([weighted_N.sum(), weight_N.sum(), least, greatest])))

    def _drain(self) -> dict[str, list[float]]:
        """Move all sums of this rank to the host, in one transfer, and reset them."""
        for name in list(self._on_device):
            self._fold(name)
        sums, self._sums = self._sums, defaultdict(self._sums.default_factory)
        folded, self._folded = self._folded, []
        if folded:
            device = folded[0][1].device
            rows = torch.stack([each.to(device) for _, each in folded]).tolist()
            for (name, _), each in zip(folded, rows, strict=True):
                sums[name] = _merge(sums[name], each)
        groups, self._groups = self._groups, {}
        for (means, totals), sums_2G in groups.items():
            for mean, total, weighted, weight in zip(means, totals, *sums_2G.tolist(), strict=True):
                if weight:
                    # The extremes are unknown, so this mean is not clamped.
                    sums[mean] = _merge(sums[mean], [weighted, weight, -math.inf, math.inf])
                    self.reduced.add(total, weight, "sum")
        return sums

    def _merge_ranks(
        self, sums: Mapping[str, list[float]], world: World, *, num_reduced: int = 0
    ) -> tuple[list[list[float]], int, int]:
        """Merge the known names over all ranks in one collective, and sum the counts of unknown and reduced names."""
        rows = [sums.get(name) or _empty_sums() for name in self._known_names]
        num_unknown = len(sums.keys() - set(self._known_names))
        dtype = torch.float32 if world.device.type == "mps" else torch.float64
        packed = torch.tensor([*rows, [num_unknown, num_reduced, 0, 0]], dtype=dtype, device=world.device)
        per_rank = world.all_gather(packed.flatten()).view(world.size, *packed.shape).tolist()
        # In rank order, so that the result is equal on every rank.
        *total, last = (functools.reduce(_merge, each) for each in zip(*per_rank, strict=True))
        return total, int(last[0]), int(last[1])


def group_sums(value_B: Tensor, group_B: Tensor, weight_B: Tensor | None, num_groups: int) -> Tensor:
    """Return the sums of weight * value and of weight in each group, shape [2, G]; never waits for the device.

    Args:
        value_B: a number for each row; ignored where the weight is 0, even NaN.
        group_B: the group of each row, from 0 to G - 1.
        weight_B: the weight of each row; None for 1.
        num_groups: G.
    """
    dtype = torch.float32 if value_B.device.type == "mps" else torch.float64
    weight_B = torch.ones_like(value_B, dtype=dtype) if weight_B is None else weight_B.detach().to(dtype)
    weighted_B = torch.where(weight_B == 0, 0, value_B.detach().to(dtype) * weight_B)
    is_in_BG = group_B[:, None] == torch.arange(num_groups, device=group_B.device)
    # Not an indexed addition, whose order differs between runs on a GPU.
    return torch.stack([torch.where(is_in_BG, each[:, None], 0).sum(0) for each in (weighted_B, weight_B)])


def clamp(mean: float, least: float, greatest: float) -> float:
    """Return a mean clamped to the range of its values, because rounding may exceed it; NaN stays NaN."""
    return min(max(mean, least), greatest)


def _empty_sums() -> list[float]:
    return [0.0, 0.0, math.inf, -math.inf]


def _merge(one: list[float], other: list[float]) -> list[float]:
    return [one[0] + other[0], one[1] + other[1], min(one[2], other[2]), max(one[3], other[3])]


def not_a_number_error(name: str, value: Any) -> StepError:
    """Return the error for a step result that is not a single number."""
    what = (
        f"a tensor of shape {list(value.shape)}"
        if isinstance(value, Tensor)
        else f"{type(value).__name__} {value!r:.60}"
    )
    remedy = "return its mean, or store it in an attribute for a callback"
    if hasattr(value, "update") and hasattr(value, "compute"):
        remedy = (
            "return such an object from configure_metrics(), as in {'accuracy': ...}, and call "
            "self.metrics['accuracy'].update(...) in validation_step; its value is logged"
        )
    return StepError(
        f"the step returned {what} as {name!r}, which must be a number or a tensor of one element: {remedy}"
    )
