"""Parameters by name, for what is said of their gradients: groups whose norm is logged, and those that got none."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .errors import ConfigError, StepError
from .model_state import plain_state

_MOST_NAMES = 8


def named_parameters(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields all parameters as "<model>.<name>", with the names that the user's modules give them."""
    for name, model in models.items():
        for path, value in plain_state(model, keep_vars=True).items():
            if isinstance(value, nn.Parameter):
                yield f"{name}.{path}", value


def norm_groups(models: Mapping[str, nn.Module], patterns: Sequence[str]) -> dict[str, set[torch.Tensor]]:
    """Returns the parameters whose names match each shell pattern.

    Raises:
        ConfigError: a pattern matches none.
    """
    groups: dict[str, set[torch.Tensor]] = {}
    for pattern in patterns:
        groups[pattern] = {parameter for name, parameter in named_parameters(models) if fnmatchcase(name, pattern)}
        if not groups[pattern]:
            names = [name for name, _ in named_parameters(models)]
            raise ConfigError(
                f"grad_norm_groups: {pattern!r} matches no parameter; patterns match whole names, such as "
                f"{', '.join(names[:_MOST_NAMES])}"
            )
    return groups


def report_unused(models: Mapping[str, nn.Module], unused: set[torch.Tensor], *, is_main: bool) -> None:
    """Warns of parameters that an optimizer holds and no gradient has reached.

    Raises:
        StepError: DDP waits for the gradient of every parameter, and would leave others unsynchronised.
    """
    names = [name for name, parameter in named_parameters(models) if parameter in unused]
    if not names:
        return
    what = f"{', '.join(names[:_MOST_NAMES])}{f' and {len(names) - _MOST_NAMES} more' if names[_MOST_NAMES:] else ''}"
    waiting = [each for each in models.values() if isinstance(each, DistributedDataParallel)]
    if any(unused.intersection(each.parameters()) for each in waiting if not each.find_unused_parameters):
        raise StepError(
            f"{what} got no gradient in the first update, and DDP waits for that of every parameter: leave them out of "
            "the model, freeze them, or set parallel.find_unused_parameters=True"
        )
    if is_main:
        warnings.warn(
            f"{what} got no gradient in the first update of their optimizer: is this part of the model meant to be "
            "unused? Freeze what is not to be trained",
            stacklevel=2,
        )
