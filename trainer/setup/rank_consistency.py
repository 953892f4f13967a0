"""What must be the same on every rank before the first update, and what must not be in any weight."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from ..checkpoints.model_state import named_state_tensors
from ..distributed.dtensor import to_local
from ..distributed.world import World
from ..errors import ConfigError

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_SHOWN = 8


def check_agreement(world: World, facts: Mapping[str, Any]) -> None:
    """Makes sure that all ranks train the same thing. Every rank must call this.

    Args:
        world: the ranks; they meet once.
        facts: whatever must be equal, as plain dicts, lists, numbers and text.

    Raises:
        ConfigError: on every rank, with what differs, rank by rank.
    """
    if world.size == 1:
        return
    per_rank = world.all_gather_object(dict(_flat("", facts)))
    names = sorted({name for rank in per_rank for name in rank})
    differing = [name for name in names if len({rank.get(name, "nothing") for rank in per_rank}) > 1]
    if differing:
        lines = [f"  {name}: {_by_rank([rank.get(name, 'nothing') for rank in per_rank])}" for name in differing]
        more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        raise ConfigError("the ranks are not about to train the same thing:\n" + "\n".join(lines[:_SHOWN]) + more)


def code_digests(trainer: type, models: Mapping[str, nn.Module]) -> dict[str, str]:
    """Returns a digest of what Python runs for each method of a trainer's class, by name, and one of Headway itself.

    Also one of each class of the models' modules that is not torch's: a file of the user's that a machine has in an old
    version is imported there; and the versions of the packages that they come from.

    Of the code, not of its source: a class from a file of the user's is sent to machines that do not have the file, or
    have an old one. Equal only under one version of Python.
    """
    program = {
        "headway.trainer": _digest(file.read_bytes() for file in sorted(Path(__file__).parents[1].rglob("*.py")))
    }
    for cls in trainer.__mro__:
        if cls.__module__ in ("builtins", "typing") or cls.__module__.startswith("headway.trainer."):
            continue
        for name, member in vars(cls).items():
            method: Any = getattr(member, "__func__", member)
            if name not in program and isinstance(method, FunctionType):
                program[name] = _digest(part.encode() for part in _instructions(method.__code__))
    return program | _program_of_modules({type(module) for model in models.values() for module in model.modules()})


def shapes(models: Mapping[str, nn.Module]) -> dict[str, str]:
    """Returns the shape and dtype of every parameter and buffer, by its name."""
    return {
        f"{name}.{key}": f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        for name, model in models.items()
        for key, value in named_state_tensors(model)
    }


def check_weights(world: World, models: Mapping[str, nn.Module]) -> None:
    """Makes sure that every parameter lies on a device and is finite. Every rank must call this; waits for the device.

    Buffers may be infinite, as masks of attention are.

    Raises:
        ConfigError: on every rank, with the names.
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
    finite = [torch.isfinite(value).all() for value in floating.values()]
    verdicts = torch.stack([each.to(world.device) for each in finite]).tolist() if finite else []
    not_finite = {name for name, is_finite in zip(floating, verdicts, strict=True) if not is_finite}
    for what, names in (("are on the meta device, without values", on_meta), ("are not finite", not_finite)):
        if everywhere := sorted({name for rank in world.all_gather_object(sorted(names)) for name in rank}):
            shown = ", ".join(everywhere[:_SHOWN]) + (" and more" if len(everywhere) > _SHOWN else "")
            raise ConfigError(
                f"before the first update, these parameters {what}: {shown}. Look at init_weights(), and at the "
                "weights that the model came with"
            )


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:12]


def _program_of_modules(classes: Iterable[type]) -> dict[str, str]:
    program: dict[str, str] = {}
    for cls in {base for each in classes for base in each.__mro__}:
        package = cls.__module__.partition(".")[0]
        if package in ("torch", "builtins", "typing", "headway"):
            continue
        functions = sorted((name, each) for name, each in vars(cls).items() if isinstance(each, FunctionType))
        parts = (part for name, each in functions for part in (name, *_instructions(each.__code__)))
        program[f"{cls.__module__}.{cls.__qualname__}"] = _digest(part.encode() for part in parts)
        # A file of the user's is no package.
        with contextlib.suppress(metadata.PackageNotFoundError):
            program[package] = metadata.version(package)
    return program


def _instructions(code: CodeType) -> Iterator[str]:
    """Yields what tells two pieces of code apart: neither where they were written nor in which file."""
    yield code.co_code.hex()
    yield repr((code.co_names, code.co_varnames, code.co_freevars))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _instructions(constant)
        else:
            # The order of a set is another one in every process.
            yield repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _flat(f"{prefix}{'.' if prefix else ''}{key}", each)
    else:
        # What has no text of its own is told by its address, which says nothing.
        yield prefix, _ADDRESS.sub("", str(value))


def _by_rank(values: list[str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ", ".join(
        f"{value} on rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who[:4]))}{' ...' if len(who) > 4 else ''}"
        for value, who in ranks.items()
    )
