"""Ranks of the tests start with everything imported, and in the folder and state of their test."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from headway.trainer.distributed.world import World
from tests.distributed import run_on_ranks


def _tell(world: World) -> tuple[bool, str, bool]:
    was_here, sys.modules["left_behind"] = "left_behind" in sys.modules, sys
    return "tests.preloaded" in sys.modules, os.getcwd(), was_here


def test_ranks_are_forked_anew_from_a_process_that_has_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert run_on_ranks(_tell, 2) == [(True, str(tmp_path), False)] * 2


def _raise(world: World) -> None:
    if world.rank == 1:
        raise ValueError("a bad batch")


def _die(world: World) -> None:
    if world.rank == 1:
        os._exit(7)
    time.sleep(60)


def test_a_rank_that_raises_or_dies_fails_its_test() -> None:
    with pytest.raises(AssertionError, match=r"rank 1 raised:\n(?s:.*)a bad batch"):
        run_on_ranks(_raise, 2)
    with pytest.raises(AssertionError, match=r"rank 1 died \(exit code 7\)"):
        run_on_ranks(_die, 2)
