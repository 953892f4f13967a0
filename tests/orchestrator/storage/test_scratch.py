"""Temporary folders of killed drivers are removed by the next one."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from headway.orchestrator.storage.scratch import scratch_folder

DRIVER = """
import tempfile, time
tempfile.tempdir = {tmp!r}
from headway.orchestrator.storage.scratch import scratch_folder
with scratch_folder() as folder:
    print(folder, flush=True)
    time.sleep(600)
"""


def test_the_next_driver_removes_what_a_killed_one_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    foreign = tmp_path / "headway-ray-of-an-earlier-version"
    foreign.mkdir()
    code = DRIVER.format(tmp=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        left = Path(driver.stdout.readline().strip())
        assert left.is_dir()
        with scratch_folder():
            assert left.is_dir(), "its driver is alive"
        driver.kill()
    with scratch_folder() as mine:
        assert Path(mine).is_dir()
        assert not left.parent.exists()
    assert list(tmp_path.iterdir()) == [foreign]
