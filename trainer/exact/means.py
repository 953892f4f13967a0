"""Weighted means with exact sums, which do not depend on the order of micro-batches or ranks."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..distributed.world import World
from ..errors import StepError
from ..metrics.means import MeanMetrics, not_a_number_error
from ..metrics.reductions import Reduce, to_float64

_SMALLEST = 1074
"""Every finite float64 is a multiple of 2**-1074."""

_ONE = 1 << _SMALLEST
"""The number 1 in units of 2**-1074."""

_STACK_AT = 1024


@dataclass(slots=True)
class _Sums:
    """Exact sums of one metric.

    Attributes:
        weighted: sum of weight * value, in units of 2**-2148.
        weight: sum of weight, in units of 2**-1074.
        not_finite: sum of weight * value over values that are not finite.
        is_total: whether `value` is the sum instead of the mean.
    """

    weighted: int = 0
    weight: int = 0
    not_finite: float = 0.0
    is_total: bool = False

    def add(self, value: float, weight: float) -> None:
        if not math.isfinite(weight):
            self.not_finite = math.nan
            return
        units = _units(weight)
        self.weight += units
        if math.isfinite(value):
            self.weighted += units * _units(value)
        else:
            self.not_finite += weight * value

    def merge(self, other: _Sums) -> None:
        self.weighted += other.weighted
        self.weight += other.weight
        self.not_finite += other.not_finite
        self.is_total |= other.is_total

    def value(self) -> float:
        if self.not_finite != 0.0:
            return self.not_finite
        try:
            # Python rounds the quotient of two integers once, to the nearest float.
            return self.weighted / ((_ONE if self.is_total else self.weight) * _ONE)
        except OverflowError:
            return math.inf if self.weighted > 0 else -math.inf


class ExactMeans(MeanMetrics):
    """`MeanMetrics` for exact mode: a mean is rounded once, at the end.

    Its bits therefore depend only on the micro-batches, not on how the ranks divide them. Costs slightly more on the
    host, and keeps every device value until `read`.

    Example:
        >>> means = ExactMeans()
        >>> for value in (0.1, 0.2, 0.3, 1e16, -1e16):
        ...     means.add({"loss": value})
        >>> means.read(World.single("cpu"))
        {'loss': 0.12}
    """

    def __init__(self) -> None:
        super().__init__()
        self._exact: dict[str, _Sums] = {}
        self._kept: list[tuple[str, Tensor, Tensor | float]] = []
        self._stacks: list[tuple[list[str], Tensor]] = []

    def add(self, outputs: Mapping[str, Any], weight: Tensor | float = 1, prefix: str = "") -> None:
        """Add the numbers of one micro-batch of this rank, as `MeanMetrics.add` does."""
        if isinstance(weight, Tensor) and weight.is_cpu:
            weight = weight.item()
        for key, value in outputs.items():
            name = prefix + key
            if isinstance(value, Mapping):
                self.add(value, weight, f"{name}/")
                continue
            if isinstance(value, Tensor):
                if value.numel() != 1:
                    raise not_a_number_error(name, value)
                if value.is_cpu:
                    value = value.item()
            elif not isinstance(value, numbers.Real):
                raise not_a_number_error(name, value)
            if isinstance(value, Tensor) or isinstance(weight, Tensor):
                own = (
                    value.detach().clone()
                    if isinstance(value, Tensor)
                    else torch.tensor(float(value), dtype=torch.float64)
                )
                self._kept.append((name, own, weight))
                if len(self._kept) >= _STACK_AT:
                    self._stack()
            elif weight:
                self._exact.setdefault(name, _Sums()).add(float(value), float(weight))

    def add_groups(self, sums_2G: Tensor, means: Sequence[str], totals: Sequence[str]) -> None:
        """Add many means that belong together, as `MeanMetrics.add_groups` does; all sums are exact."""
        for name in totals:
            self.reduced.check_kind(name, "sum")
            self._exact.setdefault(name, _Sums(is_total=True))
        weighted_G, weight_G = sums_2G
        self._stacks.append((list(means), torch.stack([weighted_G / weight_G, weight_G], dim=1)))
        self._stacks.append((list(totals), torch.stack([weight_G, (weight_G > 0).to(weight_G.dtype)], dim=1)))

    def _log_reduced(self, name: str, value: Any, reduce: Reduce) -> None:
        """Add one number that is not averaged; sums are exact as well.

        Raises:
            StepError: as in `MeanMetrics.log`, or `reduce` is "last".
        """
        if reduce == "last":
            raise StepError(
                f"log({name!r}, reduce='last') depends on which rank has a value, which exact=True does not allow: log "
                "a mean, a sum or an extreme"
            )
        if reduce == "sum":
            self.reduced.check_kind(name, reduce)
            self._exact.setdefault(name, _Sums(is_total=True))
            self.add({name: value})
        else:
            super()._log_reduced(name, value, reduce)

    def read(self, world: World) -> dict[str, float]:
        """Return the means since the last read, equal on any number of ranks. Every rank must call this."""
        per_rank = world.all_gather_object((self._drain_exact(), self.reduced.drain()))
        sums = _merge([sums for sums, _ in per_rank])
        for name, each in sums.items():
            if each.is_total:
                self.reduced.check_kind(name, "sum")
        self.weights = {name: each.weight / _ONE for name, each in sums.items() if each.weight and not each.is_total}
        values = {name: each.value() for name, each in sums.items() if each.weight or each.not_finite}
        means = [name for name in values if not sums[name].is_total]
        return dict(sorted((values | self.reduced.merge_ranks([reduced for _, reduced in per_rank], means)).items()))

    def merge(self, other: MeanMetrics) -> None:
        """Add all values of another `ExactMeans`."""
        assert isinstance(other, ExactMeans)
        self._exact = _merge([self._exact, other._exact])
        self._kept += other._kept
        self._stacks += other._stacks
        self.reduced.merge(other.reduced)

    @property
    def has_values(self) -> bool:
        """Whether anything was added since the last read."""
        return bool(self._exact or self._kept or self._stacks or self.reduced.values)

    def names(self) -> set[str]:
        """Return the names of the values since the last read."""
        stacked = (name for names, _ in self._stacks for name in names)
        return {*self._exact, *(name for name, _, _ in self._kept), *stacked, *self.reduced.values}

    def reset(self) -> None:
        """Drop everything since the last read."""
        self._exact = {}
        self._kept, self._stacks = [], []
        self.reduced.values.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's sums since the last read; "sums" is for resuming without exact mode."""
        self._exact = sums = self._drain_exact()
        return {
            "sums": {
                name: [each.not_finite + each.weighted / _ONE**2, each.weight / _ONE]
                for name, each in sums.items()
                if not each.is_total
            },
            "exact products": {
                name: [hex(each.weighted), hex(each.weight), each.not_finite, each.is_total]
                for name, each in sums.items()
            },
            "reduced": self.reduced.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore a state of this class or of `MeanMetrics`, and drop everything else."""
        self.reset()
        self.reduced.load_state_dict(state_dict["reduced"])
        if "exact products" in state_dict:
            for name, (weighted, weight, not_finite, is_total) in state_dict["exact products"].items():
                self._exact[name] = _Sums(int(weighted, 16), int(weight, 16), not_finite, is_total)
            return
        for name, (mean_times_weight, weight, *_) in state_dict["sums"].items():
            if math.isfinite(mean_times_weight):
                self._exact[name] = _Sums(_units(mean_times_weight) * _ONE, _units(weight))
            else:
                self._exact[name] = _Sums(0, _units(weight), mean_times_weight)

    def _stack(self) -> None:
        """Stack the kept values and weights into one tensor, shape [N, 2]."""
        kept, self._kept = self._kept, []
        device = next(each.device for _, *pair in kept for each in pair if isinstance(each, Tensor) and not each.is_cpu)
        columns = [
            torch.stack([to_float64(each, device) for each in column])
            for column in ([value for _, value, _ in kept], [weight for *_, weight in kept])
        ]
        self._stacks.append(([name for name, *_ in kept], torch.stack(columns, dim=1)))

    def _drain_exact(self) -> dict[str, _Sums]:
        """Move all sums of this rank to the host, and reset them."""
        if self._kept:
            self._stack()
        sums, self._exact = self._exact, {}
        stacks, self._stacks = self._stacks, []
        for names, pairs in stacks:
            for name, (value, weight) in zip(names, pairs.tolist(), strict=True):
                if weight:
                    sums.setdefault(name, _Sums()).add(value, weight)
        return sums


def _merge(each: list[dict[str, _Sums]]) -> dict[str, _Sums]:
    merged: dict[str, _Sums] = {}
    for sums in each:
        for name, more in sums.items():
            merged.setdefault(name, _Sums()).merge(more)
    return merged


def _units(value: float) -> int:
    """Return a finite float as an integer, in units of 2**-1074."""
    numerator, denominator = value.as_integer_ratio()
    return numerator << (_SMALLEST - denominator.bit_length() + 1)
