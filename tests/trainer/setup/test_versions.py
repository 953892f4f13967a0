"""Versions that differ between machines: refused or tolerated, and named."""

from __future__ import annotations

import warnings

import pytest

from headway.trainer import ConfigError, World
from headway.trainer.setup import versions
from headway.trainer.setup.versions import Differences, check_same_versions, compare_versions, software_versions
from tests.distributed import run_on_ranks
from tests.tiny import TinyConfig, TinyTrainer

HERE = {"python": "3.11.7", "torch": "2.13.0+cpu", "ray": "2.60.0", "headway": "0.1.0"}


@pytest.mark.parametrize(
    ("there", "refused", "tolerated"),
    [
        ({}, [], []),
        ({"python": "3.11.9"}, [], ["Python 3.11.9, not 3.11.7"]),
        ({"python": "3.12.7"}, ["Python 3.12.7, not 3.11.7"], []),
        ({"torch": "2.13.0+cu130"}, [], ["torch 2.13.0+cu130, not 2.13.0+cpu"]),
        ({"torch": "2.12.1+cpu"}, ["torch 2.12.1+cpu, not 2.13.0+cpu"], []),
        ({"ray": "2.60.1", "headway": "0.2.0"}, ["Headway 0.2.0, not 0.1.0", "Ray 2.60.1, not 2.60.0"], []),
    ],
)
def test_patches_of_python_and_builds_of_torch_are_tolerated(
    there: dict[str, str], refused: list[str], tolerated: list[str]
) -> None:
    assert compare_versions(HERE, HERE | there) == Differences(refused, tolerated)


def test_a_package_that_one_machine_lacks_is_not_compared() -> None:
    assert compare_versions(HERE, {"python": "3.11.7"}) == Differences()
    assert software_versions("no-such-package").keys() == software_versions().keys() >= {"python", "torch"}


def _another_torch(world: World, version: str) -> str:
    own = software_versions() | ({"torch": version} if world.is_main is False else {})
    versions.software_versions = lambda *_: own  # type: ignore[assignment]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check_same_versions(world)
        except ConfigError:
            with pytest.raises(ConfigError, match="these ranks have other versions") as raised:
                TinyTrainer(TinyConfig(max_steps=1), world=world).fit()
            return str(raised.value)
    return "".join(str(each.message) for each in caught)


def test_ranks_with_other_versions_are_refused_by_name() -> None:
    for message in run_on_ranks(_another_torch, 2, "1.0.0"):
        assert "rank 1 on " in message
        assert "torch 1.0.0, not 2." in message
        assert message.endswith("Install the same versions on all machines of a run")


def test_ranks_with_other_builds_are_warned_of_on_the_main_rank() -> None:
    public = software_versions()["torch"].partition("+")[0]
    first, second = run_on_ranks(_another_torch, 2, f"{public}+other")
    assert f"has torch {public}+other, not {public}" in first
    assert second == ""
