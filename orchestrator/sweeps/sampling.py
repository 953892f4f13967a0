"""Values and combinations of a search space, and whether it contains the values of another sweep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from .space import Axis, When, contains

Params: TypeAlias = dict[str, Any]
"""Hyperparameters of a trial, by dotted path."""


def axis_of(value: Any) -> Any:
    """Return the axis of a field, whether conditional or not; a fixed value unchanged."""
    return value.then if isinstance(value, When) else value


def samples_of(value: Any) -> tuple[Any, ...]:
    """Return all choices of a field, typical values of a range, or the fixed value."""
    axis = axis_of(value)
    return axis.samples() if isinstance(axis, Axis) else (axis,)


def sample(space: Mapping[str, Any], draw: Callable[[str, Any], Any], point: Mapping[str, Any]) -> Params:
    """Return the values of a trial.

    Args:
        space: values and axes, by path.
        draw: returns a value for a path and its axis; called in the order of the space, for axes that apply.
        point: values to keep.
    """
    values: Params = {}
    for path, found in space.items():
        if isinstance(found, When) and not found.holds(values):
            continue
        axis = axis_of(found)
        if path in point:
            values[path] = point[path]
        else:
            values[path] = draw(path, axis) if isinstance(axis, Axis) else axis
    return values


def combinations(space: Mapping[str, Any]) -> list[Params]:
    """Return all combinations of choices; the last field changes fastest."""
    grid: list[Params] = [{}]
    for path, found in space.items():
        longer = []
        for values in grid:
            if isinstance(found, When) and not found.holds(values):
                longer.append(values)
                continue
            longer += [{**values, path: value} for value in samples_of(found)]
        grid = longer
    return grid


def fits(space: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Return whether a space has these values of a trial of another sweep; fields outside of it do not matter."""
    for path, found in space.items():
        applies = found.holds(values) if isinstance(found, When) else isinstance(found, Axis) or path in values
        if applies != (path in values) or (applies and not contains(axis_of(found), values[path])):
            return False
    return True


def conditions(space: Mapping[str, Any], path: str) -> list[Params]:
    """Return the values of other fields for which an axis applies, as alternatives."""
    axis = space[path]
    if not isinstance(axis, When):
        return [{}]
    return [{**above, axis.path: value} for above in conditions(space, axis.path) for value in axis.wanted]
