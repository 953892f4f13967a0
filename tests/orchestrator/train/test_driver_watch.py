"""A driver that ends with its Ray leaves a sentence and a closed record; a killed one does not blame Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from headway.orchestrator import Experiment, Run
from headway.orchestrator.runs.open import open_run
from headway.trainer import Trainer, TrainerConfig
from tests.orchestrator.cluster.test_connect import child, driver, wait_for

__all__ = ["driver"]


@dataclass(frozen=True, kw_only=True)
class PlainConfig(TrainerConfig):
    pass


class Plain(Trainer[PlainConfig]):
    pass


@pytest.fixture
def raylet() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def watch(run: Run, raylet: subprocess.Popen[bytes] | None, driver: int | None = None) -> subprocess.Popen[str]:
    settings = {
        "run_dir": run.run_dir, "lease": run.lease, "driver": driver or os.getpid(), "address": "127.0.0.1:9",
        "servers": [] if raylet is None else [[raylet.pid, "raylet"]],
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "headway.orchestrator.train.driver_watch", json.dumps(settings)],
        stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return open_run(Experiment(name="a", trainer=Plain, config=PlainConfig(max_steps=1), storage=str(tmp_path))).run


def test_a_ray_that_dies_before_its_driver_is_the_cause(run: Run, raylet: subprocess.Popen[bytes]) -> None:
    watcher = watch(run, raylet)
    raylet.kill()
    raylet.wait()
    _, said = watcher.communicate(timeout=60)
    assert said == "headway: the run has ended: Ray died: its process raylet ended; to resume, start it again\n"
    record = Run(run.run_dir).record
    assert (record.status, record.error) == ("failed", "Ray died: its process raylet ended; to resume, start it again")


def test_a_killed_driver_does_not_blame_its_ray(run: Run, raylet: subprocess.Popen[bytes]) -> None:
    _, said = watch(run, raylet).communicate(timeout=60)
    assert f"its driver (process {os.getpid()}) was killed" in said
    assert Run(run.run_dir).record.status == "running"


# A killed process whose main thread has ended before its others, which happens on a busy machine.
HALF_ENDED = """
import ctypes, platform, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the state of another process is read from /proc")
def test_a_killed_driver_that_takes_long_to_end_does_not_blame_its_ray(
    run: Run, raylet: subprocess.Popen[bytes]
) -> None:
    with subprocess.Popen([sys.executable, "-c", HALF_ENDED]) as driver:
        try:
            while Path(f"/proc/{driver.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.01)
            watcher = watch(run, raylet, driver.pid)
            raylet.kill()
            raylet.wait()
            with pytest.raises(subprocess.TimeoutExpired):
                watcher.wait(1)
            _, said = watcher.communicate(timeout=60)
        finally:
            driver.kill()
    assert f"its driver (process {driver.pid}) was killed" in said
    assert Run(run.run_dir).record.status == "running"


def test_a_lost_head_of_a_cluster_is_the_cause(run: Run) -> None:
    _, said = watch(run, None).communicate(timeout=60)
    assert "lost Ray: its head at 127.0.0.1:9 cannot be reached; to resume, start it again" in said
    assert Run(run.run_dir).record.status == "failed"


def test_nothing_is_said_or_written_after_a_goodbye_or_a_takeover(run: Run) -> None:
    assert watch(run, None).communicate("goodbye\n", timeout=60)[1] == ""
    assert Run(run.run_dir).record.status == "running"
    watcher = watch(run, None)
    run.update(claim="999-another", driver=run.record.driver)
    watcher.communicate(timeout=60)
    assert Run(run.run_dir).record.status == "running"


@pytest.mark.ray
@pytest.mark.extended
def test_a_dead_raylet_is_told_and_the_same_command_resumes(driver: subprocess.Popen[str], tmp_path: Path) -> None:
    record = tmp_path / "runs/line/metrics.jsonl"
    wait_for(lambda: record.exists() and record.read_text(), driver)
    os.kill(child(driver.pid, "raylet"), signal.SIGKILL)
    out, _ = driver.communicate(timeout=200)
    assert driver.returncode != 0
    assert "Ray died: its process raylet ended; to resume, start it again" in out
    found = Run(str(tmp_path / "runs/line")).record
    assert found.status == "failed"
    assert "Ray died: its process raylet ended; to resume, start it again" in str(found.error)
    command = [
        sys.executable,
        "-m",
        "headway.orchestrator",
        "fit",
        "line.py",
        "config.max_steps=5",
        "scaling.workers=2",
    ]
    again = subprocess.run(
        [*command, "scaling.cpus_per_worker=0.5", f"storage={tmp_path}/runs"], cwd=tmp_path, capture_output=True,
        text=True, timeout=300, env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert "resuming" in again.stdout
