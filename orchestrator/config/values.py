"""Values at dotted paths of an experiment, as Ray's `train_loop_config` and `param_space` give them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
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
    names = [each.name for each in fields(settings) if each.init]
    changes: dict[str, Any] = {}
    for name in dict.fromkeys(each.partition(".")[0] for each in values):
        where = f"{path}.{name}" if path else name
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {where.removesuffix(name)}{near[0]}?" if near else f"it has {', '.join(names)}"
            raise ConfigError(f"{where}: {type(settings).__name__} has no field {name!r}; {hint}")
        below = {each.partition(".")[2]: value for each, value in values.items() if each.startswith(f"{name}.")}
        if name in values and below:
            raise ConfigError(f"{where} is set as a whole and in part: use only one of them")
        current, value = getattr(settings, name), values.get(name)
        if isinstance(value, Mapping) and is_dataclass(current):
            below = {str(key): each for key, each in value.items()}
        if not below:
            changes[name] = value.item() if isinstance(value, np.generic) else value
        elif is_dataclass(current) and not isinstance(current, type):
            changes[name] = with_values(current, below, where)
        else:
            raise ConfigError(f"{where} is {current!r}, which has no field {next(iter(below))!r}")
    return replace(settings, **changes)
