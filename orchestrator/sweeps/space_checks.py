"""Checks of a search space before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.trainer.errors import ConfigError

from .sampling import axis_of
from .schedulers import PBT
from .space import Axis, Choice, Grid, LogUniform, Normal, RandInt, Uniform, When, as_axis, contains

_RANGES = (Uniform, LogUniform, RandInt, Normal)


def check_space(space: Mapping[str, Any], algorithm: Any) -> None:
    """Check that a space is consistent, and that the algorithm can search it.

    Raises:
        ConfigError: it is not; names the path.
    """
    before: set[str] = set()
    for path, axis in space.items():
        if not isinstance(path, str) or not all(part.isidentifier() for part in path.split(".")):
            raise ConfigError(f"space: {path!r} is not a dotted path such as config.learning_rate")
        if isinstance(axis, Mapping) and (nested := [key for key, value in axis.items() if _varies(value)]):
            raise ConfigError(f"space: {path} is a nested dict: use dotted paths, such as {path}.{nested[0]}")
        if isinstance(axis, When):
            if axis.path not in before:
                raise ConfigError(f"{path} depends on {axis.path}, which must come before it in the space")
            if not isinstance(axis.then, Axis):
                raise ConfigError(f"{path}: When needs an axis such as Choice, got {axis.then!r}")
            if isinstance(axis.then, Grid):
                raise ConfigError(f"{path}: Grid cannot be conditional: use Choice({list(axis.then.values)!r})")
            _check_occurs(path, axis, axis_of(space[axis.path]))
        _check_axis(path, axis_of(axis), algorithm)
        before.add(path)


def _varies(value: Any) -> bool:
    """Return whether a value is, or contains, something to search."""
    if isinstance(value, Mapping) and "grid_search" not in value:
        return any(map(_varies, value.values()))
    return isinstance(as_axis(value), Axis | When)


def _check_axis(path: str, axis: Any, algorithm: Any) -> None:
    if algorithm == "grid" and isinstance(axis, _RANGES):
        raise ConfigError(f"{path}: a grid needs Choice([...]), got a {type(axis).__name__}")
    if algorithm == "tpe" and isinstance(axis, Normal):
        raise ConfigError(f"{path}: algorithm='tpe' has no normal distribution, use Uniform or algorithm='random'")
    if isinstance(axis, Grid) and algorithm not in ("random", "grid"):
        raise ConfigError(
            f"{path}: Grid needs algorithm='random' or 'grid', as others choose values themselves: use "
            f"Choice({list(axis.values)!r})"
        )


def _check_occurs(path: str, axis: When, above: Any) -> None:
    """Check that a condition can hold."""
    if isinstance(above, _RANGES):
        return
    there = above.values if isinstance(above, (Choice, Grid)) else (above,)
    if never := [value for value in axis.wanted if value not in there]:
        raise ConfigError(
            f"{path} applies when {axis.path} is {' or '.join(map(repr, never))}, which never happens: its values "
            f"are {', '.join(map(repr, there))}"
        )


def check_varied(space: Mapping[str, Any], pbt: PBT, varied: Mapping[str, Any]) -> None:
    """Check what `PBT` varies.

    Raises:
        ConfigError: it cannot vary that.
    """
    axes = {path: axis for path, axis in space.items() if isinstance(axis, Axis | When)}
    if unknown := [path for path in pbt.vary if path not in axes]:
        raise ConfigError(f"PBT(vary=...) names {', '.join(unknown)}, for which the space has no axis")
    conditional = [axis for axis in axes.values() if isinstance(axis, When)]
    if tied := [path for path in varied if axes[path] in conditional] + [
        axis.path for axis in conditional if axis.path in varied
    ]:
        raise ConfigError(
            f"PBT cannot vary {', '.join(tied)}, which depends on another field or on which one depends: the "
            "fields of a trial would change while it trains; name other fields in PBT(vary=...)"
        )
    if grids := [path for path in varied if isinstance(axes[path], Grid)]:
        raise ConfigError(f"PBT cannot vary {', '.join(grids)}, which is a Grid: use Choice")
    if not varied:
        raise ConfigError("PBT has nothing to vary: add a Uniform or LogUniform outside of When to the space")


def check_point(space: Mapping[str, Any], name: str, point: Any) -> None:
    """Check that a point consists of values of the space.

    Raises:
        ConfigError: it does not.
    """
    if not isinstance(point, Mapping) or not point:
        raise ConfigError(f"{name} must be a dict of values by path, got {point!r}")
    for path, value in point.items():
        if path not in space:
            raise ConfigError(f"{name}: {path} is not in the space, which has {', '.join(space)}")
        axis = space[path]
        if isinstance(axis, When) and not axis.holds(point):
            raise ConfigError(
                f"{name}: {path} applies when {axis.path} is {' or '.join(map(repr, axis.wanted))}: add that"
            )
        if not contains(axis_of(axis), value):
            raise ConfigError(f"{name}: {path}={value!r} is not a value of {axis_of(axis)!r}")
