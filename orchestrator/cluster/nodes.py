"""The nodes of the connected cluster that the workers of a run may use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from ..config.scaling import Scaling


def usable_nodes(scaling: Scaling) -> list[dict[str, Any]]:
    """Return the live nodes of the connected cluster that have the labels which workers need, as `ray.nodes` does."""
    return [
        node
        for node in ray.nodes()
        if node["Alive"]
        and all(has_label(node["Labels"], name, wanted) for name, wanted in scaling.label_selector.items())
    ]


def has_label(labels: Mapping[str, str], name: str, wanted: str) -> bool:
    """Return whether a node meets one condition of a `label_selector`: "a", "!a", "in(a, b)" or "!in(a, b)".

    A node without the label meets conditions with "!".
    Source: https://docs.ray.io/en/latest/ray-core/scheduling/labels.html
    """
    values = wanted.removeprefix("!").removeprefix("in(").removesuffix(")").split(",")
    is_one_of = labels.get(name) in [value.strip() for value in values]
    return is_one_of != wanted.startswith("!")
