"""A script without a guard does not start its run again in the processes that it spawns."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headway.trainer import ConfigError, World
from tests.tiny import TinyConfig, TinyTrainer

ALONE = World.single("cpu")
_SCRIPT = """
import sys

from headway.trainer import World
from tests.tiny import TinyConfig, TinyTrainer


class Spawning(TinyTrainer):
    def configure_dataloaders(self):
        train, _ = super().configure_dataloaders()
        train.multiprocessing_context = "spawn"
        return train


Spawning(TinyConfig(max_steps=2, num_workers=1), run_dir=sys.argv[1]).fit()
"""


@pytest.mark.parametrize("start", ["fit", "setup", "check"])
def test_a_process_that_is_being_spawned_starts_no_run(start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(ConfigError, match="put what starts it below `if __name__ =="):
        getattr(TinyTrainer(TinyConfig(max_steps=1), world=ALONE), start)()


@pytest.mark.extended
def test_a_script_without_a_guard_is_told_to_have_one(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    ended = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run")], capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert ended.returncode == 1
    assert "ConfigError: a process that this script has spawned" in ended.stderr
    assert "OwnedByAnotherError" not in ended.stderr
