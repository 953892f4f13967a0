"""Values at dotted paths of an experiment, as Ray's `train_loop_config` and `param_space` give them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass, replace
from typing import Any

import numpy as np

from headway.trainer.errors import ConfigError


def with_values(settings: Any, values: Mapping[str, Any], path: str = "") -> Any:
    """Return a dataclass with the values at dotted paths, such as {"config.learning_rate": 1e-3}.

    Unlike `override`, it does not use the types of fields, which a class that was pickled by value cannot resolve.
    NumPy numbers become plain ones, and a dict of a section's fields changes these.

    Args:
        settings: the dataclass to change.
        values: new values by path.
        path: path of `settings`, for errors.

    Raises:
        ConfigError: names the path, and the nearest valid name.
    """
    changes: dict[str, Any] = {}
    for name in dict.fromkeys(each.partition(".")[0] for each in values):
        where = f"{path}.{name}" if path else name
        _check_field(settings, name, where)
        below = {each.partition(".")[2]: value for each, value in values.items() if each.startswith(f"{name}.")}
        if name in values and below:
            raise ConfigError(f"{where} is set as a whole and in part: use only one of them")
        current, value = getattr(settings, name), values.get(name)
        if isinstance(value, Mapping) and is_dataclass(current):
            below = {str(key): each for key, each in value.items()}
        if not below:
            changes[name] = python_values(value)
        else:
            changes[name] = with_values(current, below, where)
    return replace(settings, **changes)


def python_values(value: Any) -> Any:
    """Return NumPy scalars as Python numbers and strings, also those in lists, tuples and dicts."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(map(python_values, value))
    if type(value) is dict:
        return {key: python_values(each) for key, each in value.items()}
    return value


def check_paths(settings: Any, paths: Iterable[str]) -> None:
    """Check that a dataclass has fields at dotted paths, whatever their values.

    Raises:
        ConfigError: names the path, and the nearest valid name.
    """
    for path in paths:
        section, where = settings, ""
        for name in path.split("."):
            where = f"{where}.{name}" if where else name
            _check_field(section, name, where)
            section = getattr(section, name)


def _check_field(section: Any, name: str, where: str) -> None:
    """Check that a section has a field, whose path is `where`."""
    if not is_dataclass(section) or isinstance(section, type):
        raise ConfigError(f"{where.removesuffix(f'.{name}')} is {section!r}, which has no field {name!r}")
    names = [each.name for each in fields(section) if each.init]
    if name not in names:
        # Such as a field of its config, in an experiment.
        inner = [f"{outer}.{each.name}" for outer in names for each in _fields_of(getattr(section, outer))]
        near = [each for each in inner if each.endswith(f".{name}")] or difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {where.removesuffix(name)}{near[0]}?" if near else f"it has {', '.join(names)}"
        raise ConfigError(f"{where}: {type(section).__name__} has no field {name!r}; {hint}")


def _fields_of(value: Any) -> Sequence[Field[Any]]:
    return fields(value) if is_dataclass(value) and not isinstance(value, type) else ()
