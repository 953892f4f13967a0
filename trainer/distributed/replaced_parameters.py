"""Parameters that replace those of the user's code when a model leaves the meta device or is sharded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter

from ..private_torch import has_gradient_hooks


class ReplacedParameters:
    """Gives the parameters that replace others their attributes, and their places in the user's lists and dicts.

    Args:
        models: whose parameters are not replaced yet.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._places = [
            (module, key, parameter)
            for model in models.values()
            for module in model.modules()
            for key, parameter in module._parameters.items()
            if parameter is not None
        ]

    def follow(self, program: object, models: Mapping[str, nn.Module]) -> None:
        """Give each parameter that has replaced another its attributes, and put it where the user's code has the other.

        Args:
            program: whose public attributes may hold parameters, also in lists, tuples, sets and dicts.
            models: whose modules may hold parameters likewise, beside those that they own.
        """
        replaced: dict[int, nn.Parameter] = {}
        for module, key, old in self._places:
            new = module._parameters.get(key)
            if new is not None and new is not old:
                vars(new).update(vars(old))
                replaced[id(old)] = new
        if not replaced:
            return
        for owner in (program, *(module for model in models.values() for module in model.modules())):
            attributes = vars(owner)
            for name, value in list(attributes.items()):
                if not name.startswith("_") and (now := _with_new(value, replaced)) is not value:
                    attributes[name] = now


def _with_new(value: Any, replaced: Mapping[int, nn.Parameter]) -> Any:
    """Return a value with new parameters for old ones: changed in place, if it can be."""
    if isinstance(value, nn.Parameter):
        return replaced.get(id(value), value)
    if isinstance(value, list):
        for i, each in enumerate(value):
            if (now := _with_new(each, replaced)) is not each:
                value[i] = now
    elif isinstance(value, dict):
        for key, each in value.items():
            if (now := _with_new(each, replaced)) is not each:
                value[key] = now
    elif type(value) in (tuple, set, frozenset):
        parts = [_with_new(each, replaced) for each in value]
        if any(now is not each for now, each in zip(parts, value, strict=True)):
            return type(value)(parts)
    return value


def marked(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, str]]:
    """Yield the parameters that no other can replace, because code is attached to them, by name, and why."""
    for model, module in models.items():
        for name, parameter in module.named_parameters(model):
            if has_gradient_hooks(parameter):
                yield name, "has a hook"
            elif nn.Parameter in type(parameter).__bases__ and not isinstance(parameter, UninitializedParameter):
                yield name, f"is a {type(parameter).__name__}"
