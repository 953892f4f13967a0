"""Versions of Python and packages, which must be equal on all machines of a run."""

from __future__ import annotations

import platform
import socket
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata

import torch

from ..distributed.world import World
from ..errors import ConfigError

_NAMES = {"python": "Python", "torch": "torch", "ray": "Ray", "headway": "Headway"}
_SHOWN = 8


@dataclass(frozen=True)
class Differences:
    """Differences between the versions of two machines, each as text.

    Attributes:
        refused: differences that prevent training.
        tolerated: differences that deserve a warning.
    """

    refused: list[str] = field(default_factory=list)
    tolerated: list[str] = field(default_factory=list)


def software_versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python, torch, Headway and further packages, without packages that are not installed."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("headway", *packages):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def compare_versions(here: Mapping[str, str], there: Mapping[str, str]) -> Differences:
    """Compare the versions of two machines.

    Patch versions of Python read one another's pickles and bytecode, and torch has builds for machines with and without
    a GPU ("2.11.0+cpu"): these differences are tolerated.

    Args:
        here: from `software_versions`.
        there: the same of the other machine; a package that one of them lacks is not compared.
    """
    differences = Differences()
    for name in sorted(here.keys() & there.keys()):
        if here[name] == there[name]:
            continue
        is_tolerated = _essential(name, here[name]) == _essential(name, there[name])
        to = differences.tolerated if is_tolerated else differences.refused
        to.append(f"{_NAMES.get(name, name)} {there[name]}, not {here[name]}")
    return differences


def check_same_versions(world: World) -> None:
    """Check that all ranks have the versions of rank 0. Every rank must call this.

    Raises:
        ConfigError: they differ; raised on every rank.
    """
    if world.size == 1:
        return
    found = world.all_gather_object((socket.gethostname(), software_versions()))
    first_host, first = found[0]
    ranks = [(host, compare_versions(first, there)) for host, there in found]
    refuse_differences(ranks, than=f"rank 0 on {first_host}")
    tolerated = [(rank, host, each.tolerated) for rank, (host, each) in enumerate(ranks) if each.tolerated]
    if tolerated and world.is_main:
        rank, host, differences = tolerated[0]
        more = f", and {len(tolerated) - 1} more ranks differ" if len(tolerated) > 1 else ""
        warnings.warn(
            f"rank {rank} on {host} has {', '.join(differences)} as rank 0 on {first_host}{more}: results may differ "
            "from results with equal versions",
            stacklevel=2,
        )


def refuse_differences(ranks: Sequence[tuple[str, Differences]], *, than: str) -> None:
    """Refuse to train if a rank has a version that prevents it.

    Args:
        ranks: host and differences of each rank.
        than: the process with which the ranks were compared.

    Raises:
        ConfigError: names the ranks, their hosts and their versions.
    """
    refused = [
        f"  rank {rank} on {host}: {', '.join(each.refused)}" for rank, (host, each) in enumerate(ranks) if each.refused
    ]
    if refused:
        more = f"\n  and {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
        raise ConfigError(
            f"these ranks have other versions than {than}:\n"
            + "\n".join(refused[:_SHOWN])
            + f"{more}\nInstall the same versions on all machines of a run"
        )


def _essential(name: str, version: str) -> str:
    """Return the part of a version that must be equal."""
    if name == "python":
        return ".".join(version.split(".")[:2])
    return version.partition("+")[0] if name == "torch" else version
