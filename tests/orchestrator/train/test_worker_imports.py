"""A worker imports the modules that the script imports."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from headway.orchestrator.train.worker import enter_driver_folders


def test_a_worker_imports_what_a_script_in_another_folder_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("script", "here"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "of_the_same_name.py").write_text(f"PLACE = {folder!r}")
    here, script = str(tmp_path / "here"), str(tmp_path / "script")
    monkeypatch.chdir(here)
    # As Ray starts a worker: with the driver's current folder first, and with its PYTHONPATH.
    monkeypatch.setattr(sys, "path", [here, script, *sys.path])
    enter_driver_folders(here, (script,))
    assert importlib.import_module("of_the_same_name").PLACE == "script"
    del sys.modules["of_the_same_name"]
