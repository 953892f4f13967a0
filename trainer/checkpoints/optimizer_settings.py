"""What `configure_optimizers` has set, so that a change that a resumed run accepts is in force."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..private_torch import inner_schedulers, set_last_lr

_PLAIN = (bool, int, float, str, type(None))
_POSITION = ("last_epoch", "_step_count", "_last_lr")
"""Of a scheduler: not settings."""


class OptimizerSettings:
    """The settings of optimizers and schedulers as the user's code made them, as a part of a checkpoint.

    A checkpoint also has their current values, which a resumed run continues with: a schedule has moved the learning
    rate. `adopt` replaces those that the user's code now sets differently.

    Args:
        optimizers, schedulers: by name, as `configure_optimizers` made them, before anything is loaded.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer], schedulers: Mapping[str, LRScheduler]) -> None:
        self._optimizers, self._schedulers = optimizers, schedulers
        self._made = {path: _settings_of(owner) for path, owner in self._owners()}
        self._saved: dict[str, dict[str, Any]] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the settings."""
        return {"made": copy.deepcopy(self._made)}

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Load the settings of the run that saved the checkpoint."""
        self._saved = dict(state_dict["made"])

    def adopt(self, *, accept_changes: bool) -> list[str]:
        """Put changed settings in force, after the optimizers and schedulers were loaded.

        A value that has moved since, such as a scheduled learning rate, changes in proportion.

        Args:
            accept_changes: if not, nothing changes.

        Returns:
            A line for every changed setting: what it was and is, or that it is the checkpoint's.
        """
        lines = []
        for path, owner in self._owners():
            before, now = self._saved.get(path, {}), self._made[path]
            live = _values_of(owner)
            for name in sorted(before.keys() & now.keys()):
                if before[name] == now[name] or name not in live:
                    continue
                change = f"{path}.{name}: {_text(before[name])} -> {_text(now[name])}"
                current = live[name]
                if not accept_changes:
                    lines.append(f"{change} is not in force: accept_changes=True puts it in force")
                    self._made[path][name] = before[name]
                elif _is_same(current, before[name]):
                    live[name] = _like(current, now[name])
                    lines.append(f"{change} is in force")
                elif _is_number(before[name]) and _is_number(now[name]) and before[name]:
                    value = float(current) * now[name] / before[name]
                    live[name] = _like(current, value)
                    lines.append(f"{change} is in force, from {float(current):.6g} to {value:.6g} at this step")
                else:
                    lines.append(f"{change} is not in force: it is {_text(current)}, from the checkpoint")
                    self._made[path][name] = before[name]
        for scheduler in self._schedulers.values():
            _follow(scheduler)
        return lines

    def _owners(self) -> Iterator[tuple[str, Any]]:
        for name, optimizer in self._optimizers.items():
            for number, group in enumerate(optimizer.param_groups):
                label = group.get("name", number)
                yield f"{name}/{label}" if len(optimizer.param_groups) > 1 else name, group
        for name, scheduler in self._schedulers.items():
            yield from _with_inner(name, scheduler)


def _with_inner(name: str, scheduler: LRScheduler) -> Iterator[tuple[str, LRScheduler]]:
    """Yield a scheduler and those inside it, as in a `SequentialLR`."""
    yield name, scheduler
    for number, inner in enumerate(inner_schedulers(scheduler)):
        yield from _with_inner(f"{name}/{number}", inner)


def _values_of(owner: Any) -> dict[str, Any]:
    values: dict[str, Any] = owner if isinstance(owner, dict) else vars(owner)
    return values


def _settings_of(owner: Any) -> dict[str, Any]:
    return {
        name: float(value) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for name, value in _values_of(owner).items()
        if name not in ("params", *_POSITION) and (_is_plain(value) or _is_scalar(value))
    }


def _follow(scheduler: LRScheduler) -> None:
    """Let a scheduler report the rates of its optimizer."""
    for _, each in _with_inner("", scheduler):
        if hasattr(each, "optimizer"):
            set_last_lr(each, [group["lr"] for group in each.optimizer.param_groups])


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(key) and _is_plain(each) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_same(current: Any, before: Any) -> bool:
    return bool((float(current) if _is_scalar(current) else current) == before)


def _like(current: Any, value: Any) -> Any:
    return torch.full_like(current, value) if _is_scalar(current) else copy.deepcopy(value)


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else repr(value)
