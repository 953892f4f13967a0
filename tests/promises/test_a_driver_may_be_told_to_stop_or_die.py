"""Stopping a run of another process by name, and restarting a killed driver, lose nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.orchestrator import Run
from headway.orchestrator.storage.events import Event, read_events
from headway.orchestrator.storage.folder import Folder
from headway.trainer.trackers.jsonl import read_records
from tests.promises.test_a_hang_ends_by_itself import is_there
from tests.promises.test_ctrl_c_loses_nothing import TARGET

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SETTINGS = ["config.max_steps=100000", "config.log_every=5", "scaling.workers=2"]


def wait_for(condition: Callable[[], bool], driver: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        assert driver.poll() is None, driver.communicate()
        time.sleep(0.05)


def wait_for_step(step: int, run_dir: Path, driver: subprocess.Popen[str]) -> None:
    wait_for(lambda: any(record["step"] >= step for record in read_records(run_dir / "metrics.jsonl")), driver)


def start(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "headway.orchestrator", "fit", "line.py", *SETTINGS, f"storage={folder}/runs"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, start_new_session=True,
        env={**{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip


def stop(folder: Path, *options: str) -> str:
    command = [sys.executable, "-m", "headway.orchestrator", "runs", "stop", "line", "--storage", f"{folder}/runs"]
    return subprocess.run(
        [*command, *options], cwd=folder, capture_output=True, text=True, check=True, timeout=300
    ).stdout


def events(run_dir: Path, kind: str) -> list[Event]:
    return [event for event in read_events(Folder(str(run_dir))) if event["event"] == kind]


@pytest.mark.extended
def test_a_driver_is_killed_and_the_next_one_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "line.py").write_text(TARGET)
    run_dir = tmp_path / "runs/line"
    drivers = [start(tmp_path)]
    try:
        wait_for_step(20, run_dir, drivers[0])
        workers = events(run_dir, "attempt_started")[0]["workers"]
        drivers[0].kill()
        assert "is gone); to resume, start it again" in stop(tmp_path, "--wait")

        drivers.append(start(tmp_path))
        wait_for(lambda: events(run_dir, "training")[1:] != [], drivers[1])
        assert not any(is_there(worker["pid"]) for worker in workers), "two attempts must not train it at a time"
        # It resumes from the last checkpoint; the first one is saved at the end of the first epoch.
        saved = [event["step"] for event in events(run_dir, "checkpoint_saved")]
        first = events(run_dir, "training")[1]["step"]
        assert first == max(saved, default=0)
        wait_for_step(first + 20, run_dir, drivers[1])
        began_s = time.time()
        assert "line has ended: stopped after" in stop(tmp_path, "--wait")
        out, _ = drivers[1].communicate(timeout=120)
        print(f"from `runs stop` to the exit of the driver: {time.time() - began_s:.1f} s")
    finally:
        for driver in drivers:
            driver.kill()
            driver.communicate()
    assert drivers[1].returncode == 0, out
    assert "headway runs stop: saving a checkpoint and ending" in out
    assert "Traceback" not in out
    run = Run(str(run_dir))
    assert (run.status, run.reason, run.record.attempts) == ("stopped", "headway runs stop", 2)
    assert run.record.steps > first
    assert str(run.record.last_checkpoint).endswith(f"step-{run.record.steps:08d}")
    assert "is not running: stopped after" in stop(tmp_path)
