"""Logged numbers that are no means: sums, extremes and last values, over micro-batches and ranks."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from ..errors import StepError

Reduce: TypeAlias = Literal["mean", "sum", "max", "min", "last"]
"""What becomes of the numbers of one name."""

Reduced: TypeAlias = Mapping[str, tuple[Reduce, float]]
"""What a name stands for on one rank."""


class Reductions:
    """Sums, extremes and last values of one rank, by name, since the last `take`; `add` never waits for a device.

    The last value is that of the first rank that has one. A NaN that counts is seen in all of them.

    Attributes:
        kinds: how each name that was ever taken in is reduced.
        values: what each stands for, on the device where it was made.
    """

    def __init__(self) -> None:
        self.kinds: dict[str, Reduce] = {}
        self.values: dict[str, float | Tensor] = {}

    def add(self, name: str, value: Any, reduce: Reduce) -> None:
        """Takes a number in.

        Raises:
            StepError: it is no single number, there is no such `reduce`, or the name has another one.
        """
        if reduce not in get_args(Reduce):
            raise StepError(f"log({name!r}) takes reduce={', '.join(get_args(Reduce))}, not {reduce!r}")
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item() if value.is_cpu else _exact(value.detach()).reshape(()).clone()
        elif isinstance(value, numbers.Real):
            value = float(value)
        else:
            raise StepError(f"log({name!r}) takes a number or a tensor of one element, not {value!r:.60}")
        self._merge_value(name, reduce, value)

    def merge(self, other: Reductions) -> None:
        """Takes in all that another one has, as if it came now."""
        for name, value in other.values.items():
            self._merge_value(name, other.kinds[name], value)

    def drain(self) -> dict[str, tuple[Reduce, float]]:
        """Brings all values of this rank to the host, in one transfer, and forgets them."""
        values, self.values = self.values, {}
        lying = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        if lying:
            device = next(iter(lying.values())).device
            read = torch.stack([value.to(device) for value in lying.values()]).tolist()
            values |= dict(zip(lying, read, strict=True))
        return {name: (self.kinds[name], float(value)) for name, value in values.items()}

    def merge_ranks(self, ranks: Sequence[Reduced], means: Iterable[str]) -> dict[str, float]:
        """Returns what all ranks have merged, of what they have taken; equal on every rank.

        Raises:
            StepError: a name is reduced in two ways; raised on every rank that has logged it, then or before.
        """
        merged = Reductions()
        # The first rank's last: that is its value then.
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
        """Returns what this rank has taken in and not given yet."""
        taken = self.drain()
        self.values = {name: value for name, (_, value) in taken.items()}
        return {"kinds": dict(self.kinds), "values": dict(self.values)}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Takes it over, and forgets what was there."""
        self.kinds, self.values = dict(state_dict["kinds"]), dict(state_dict["values"])

    def _merge_value(self, name: str, reduce: Reduce, value: float | Tensor) -> None:
        self.check_kind(name, reduce)
        self.values[name] = combine(reduce, self.values[name], value) if name in self.values else value

    def check_kind(self, name: str, reduce: Reduce) -> None:
        """Takes note of how a name is reduced.

        Raises:
            StepError: it has been reduced in another way.
        """
        if (known := self.kinds.setdefault(name, reduce)) != reduce:
            raise StepError(
                f"{name!r} is logged as a {known} and as a {reduce}: give one of them another name, or the same reduce"
            )


def combine(reduce: Reduce, before: Any, now: Any) -> Any:
    """Returns what two values come to, numbers or tensors of one element; a mean is none of these."""
    if reduce == "last":
        return now
    if isinstance(before, Tensor) or isinstance(now, Tensor):
        device = (before if isinstance(before, Tensor) else now).device
        before, now = (_exact(each.to(device) if isinstance(each, Tensor) else each, device) for each in (before, now))
        if reduce == "sum":
            return before + now
        return torch.maximum(before, now) if reduce == "max" else torch.minimum(before, now)
    if reduce == "sum":
        return before + now
    if math.isnan(before) or math.isnan(now):
        return math.nan
    return max(before, now) if reduce == "max" else min(before, now)


def _exact(value: float | Tensor, device: torch.device | None = None) -> Tensor:
    """The number in float64, where the device has that."""
    device = device or (value.device if isinstance(value, Tensor) else torch.device("cpu"))
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return value.to(dtype) if isinstance(value, Tensor) else torch.full((), value, dtype=dtype, device=device)
