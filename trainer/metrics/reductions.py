"""Logged sums, extremes and last values, over micro-batches and ranks."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from ..errors import StepError

Reduce: TypeAlias = Literal["mean", "sum", "max", "min", "last"]
"""How the numbers of one name are reduced."""

Reduced: TypeAlias = Mapping[str, tuple[Reduce, float]]
"""The values of one rank, by name."""


class Reductions:
    """One rank's sums, extremes and last values by name since the last `drain`; `add` never waits for a device.

    "last" is the last value of the lowest rank that has one. NaN propagates.

    Attributes:
        kinds: reduction of every name that was ever added.
        values: reduced values, each on the device of its first value.
    """

    def __init__(self) -> None:
        self.kinds: dict[str, Reduce] = {}
        self.values: dict[str, float | Tensor] = {}

    def add(self, name: str, value: Any, reduce: Reduce) -> None:
        """Add a number.

        Raises:
            StepError: `value` is not a single number, or `reduce` is unknown or differs from earlier calls.
        """
        if reduce not in get_args(Reduce):
            raise StepError(f"log({name!r}): reduce must be {', '.join(get_args(Reduce))}, got {reduce!r}")
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item() if value.is_cpu else to_float64(value.detach(), value.device).clone()
        elif isinstance(value, numbers.Real):
            value = float(value)
        else:
            raise StepError(f"log({name!r}): value must be a number or a tensor of one element, got {value!r:.60}")
        self._merge_value(name, reduce, value)

    def merge(self, other: Reductions) -> None:
        """Add all values of another `Reductions`, as later ones."""
        for name, value in other.values.items():
            self._merge_value(name, other.kinds[name], value)

    def drain(self) -> dict[str, tuple[Reduce, float]]:
        """Move all values of this rank to the host, in one transfer, and reset them."""
        values, self.values = self.values, {}
        on_device = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        if on_device:
            device = next(iter(on_device.values())).device
            read = torch.stack([value.to(device) for value in on_device.values()]).tolist()
            values |= dict(zip(on_device, read, strict=True))
        return {name: (self.kinds[name], float(value)) for name, value in values.items()}

    def merge_ranks(self, ranks: Sequence[Reduced], means: Iterable[str]) -> dict[str, float]:
        """Return the values of all ranks merged; equal on every rank.

        Args:
            ranks: what `drain` returned on each rank.
            means: names logged as means, to check that no name is reduced in two ways.

        Raises:
            StepError: a name is reduced in two ways; raised on every rank that has ever logged it.
        """
        merged = Reductions()
        # Reverse order, so that for "last" rank 0's value wins.
        for of_rank in reversed(ranks):
            for name, (reduce, value) in of_rank.items():
                merged._merge_value(name, reduce, value)
        for name, reduce in merged.kinds.items():
            self.check_kind(name, reduce)
        for name in means:
            if name in self.kinds:
                self.check_kind(name, "mean")
        return {name: value for name, (_, value) in merged.drain().items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the values since the last `drain`, and how each name is reduced."""
        self.values = {name: value for name, (_, value) in self.drain().items()}
        return {"kinds": dict(self.kinds), "values": dict(self.values)}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore a state, and drop everything else."""
        self.kinds, self.values = dict(state_dict["kinds"]), dict(state_dict["values"])

    def _merge_value(self, name: str, reduce: Reduce, value: float | Tensor) -> None:
        self.check_kind(name, reduce)
        self.values[name] = combine(reduce, self.values[name], value) if name in self.values else value

    def check_kind(self, name: str, reduce: Reduce) -> None:
        """Check that a name is always reduced in the same way.

        Raises:
            StepError: `name` was reduced in another way before.
        """
        if (known := self.kinds.setdefault(name, reduce)) != reduce:
            raise StepError(
                f"{name!r} is logged as a {known} and as a {reduce}: use different names, or the same reduce"
            )


def combine(reduce: Reduce, before: Any, now: Any) -> Any:
    """Reduce two values, numbers or tensors of one element; `reduce` is not "mean"."""
    if reduce == "last":
        return now
    if isinstance(before, Tensor) or isinstance(now, Tensor):
        device = (before if isinstance(before, Tensor) else now).device
        before, now = to_float64(before, device), to_float64(now, device)
        if reduce == "sum":
            return before + now
        return torch.maximum(before, now) if reduce == "max" else torch.minimum(before, now)
    if reduce == "sum":
        return before + now
    if math.isnan(before) or math.isnan(now):
        return math.nan
    return max(before, now) if reduce == "max" else min(before, now)


def to_float64(value: Tensor | float, device: torch.device) -> Tensor:
    """Return a number, shape [], on a device, in float64 or the widest float that the device has; never waits."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    if isinstance(value, Tensor):
        return value.reshape(()).to(device, dtype, non_blocking=True)
    return torch.full((), value, dtype=dtype, device=device)
