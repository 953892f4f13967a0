"""Checks before the first update: ranks agree on config, code, models and data, and weights are finite."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoints.code_fingerprint import class_digest, method_digests
from ..checkpoints.model_state import named_state_tensors
from ..distributed.dtensor import to_local
from ..distributed.world import World
from ..errors import ConfigError

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_SHOWN = 8


def check_agreement(world: World, facts: Mapping[str, Any]) -> None:
    """Check that facts are equal on all ranks, by their digests. Every rank must call this.

    Args:
        world: the ranks.
        facts: plain dicts, lists, numbers and text that must be equal.

    Raises:
        ConfigError: facts differ; raised on every rank.
    """
    if world.size == 1:
        return
    own = dict(_flat("", facts))
    digest = hashlib.sha256(repr(sorted(own.items())).encode()).hexdigest()
    # All ranks see the same digests, so all of them take the same way.
    if len(set(world.all_gather_object(digest))) == 1:
        return
    per_rank = world.all_gather_object(own)
    names = sorted({name for rank in per_rank for name in rank})
    differing = [name for name in names if len({rank.get(name, "nothing") for rank in per_rank}) > 1]
    if differing:
        lines = [f"  {name}: {_by_rank([rank.get(name, 'nothing') for rank in per_rank])}" for name in differing]
        more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        raise ConfigError("the ranks differ in what they would train:\n" + "\n".join(lines[:_SHOWN]) + more)


def code_digests(trainer: type, models: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return digests of Headway's code, the trainer's methods and the models' classes, and versions of their packages.

    A machine may have an old version of a file with a user's class.
    """
    headway = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        headway.update(file.read_bytes())
    digests = {"headway.trainer": headway.hexdigest()[:12], **method_digests(trainer)}
    classes = {type(module) for model in models.values() for module in model.modules()}
    for cls in {base for each in classes for base in each.__mro__}:
        package = cls.__module__.partition(".")[0]
        if package in ("torch", "builtins", "typing", "headway"):
            continue
        digests[f"{cls.__module__}.{cls.__qualname__}"] = class_digest(cls)
        # A user's file is not an installed package.
        with contextlib.suppress(metadata.PackageNotFoundError):
            digests[package] = metadata.version(package)
    return digests


def shapes(models: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the shape and dtype of every parameter and buffer, by name."""
    return {
        f"{name}.{key}": f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        for name, model in models.items()
        for key, value in named_state_tensors(model)
    }


def check_weights(world: World, models: Mapping[str, nn.Module]) -> None:
    """Check that every parameter is materialized and finite. Every rank must call this; synchronizes with the device.

    Buffers may be infinite, such as attention masks.

    Raises:
        ConfigError: a parameter is not; raised on every rank.
    """
    parameters = {
        f"{name}.{key}": value
        for name, model in models.items()
        for key, value in named_state_tensors(model)
        if isinstance(value, nn.Parameter)
    }
    on_meta = {name for name, value in parameters.items() if value.is_meta}
    floating = {
        name: to_local(value.detach())
        for name, value in parameters.items()
        if not value.is_meta and value.is_floating_point()
    }
    # Torch has no isfinite for float8, whose dtypes have one byte.
    finite = [torch.isfinite(value if value.itemsize > 1 else value.float()).all() for value in floating.values()]
    verdicts = torch.stack([each.to(world.device) for each in finite]).tolist() if finite else []
    not_finite = {name for name, is_finite in zip(floating, verdicts, strict=True) if not is_finite}
    for what, names in (("are on the meta device, without values", on_meta), ("are not finite", not_finite)):
        if everywhere := sorted({name for rank in world.all_gather_object(sorted(names)) for name in rank}):
            shown = ", ".join(everywhere[:_SHOWN]) + (" and more" if len(everywhere) > _SHOWN else "")
            raise ConfigError(
                f"before the first update, these parameters {what}: {shown}. Check init_weights(), and weights that "
                "the model was created with"
            )


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _flat(f"{prefix}{'.' if prefix else ''}{key}", each)
    else:
        # The default repr contains the address, which differs between processes.
        yield prefix, _ADDRESS.sub("", str(value))


def _by_rank(values: list[str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ", ".join(
        f"{value} on rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who[:4]))}{' ...' if len(who) > 4 else ''}"
        for value, who in ranks.items()
    )
