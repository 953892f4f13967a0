"""On a real cluster of two nodes, one of which sees another folder under the same path: refused within seconds."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray

from headway.orchestrator.storage.events import read_events
from headway.orchestrator.storage.folder import Folder
from tests.machines import machines

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(500)]

ROOT = Path(__file__).parents[2]
TARGET = """
from headway.orchestrator import Experiment, Scaling
from tests.tiny import TinyConfig, TinyTrainer

scaling = Scaling(workers=2, cpus_per_worker=1)
experiment = Experiment(
    name="apart", trainer=TinyTrainer, config=TinyConfig(max_steps=9), storage="runs", scaling=scaling
)
"""


def _can_mount() -> bool:
    return shutil.which("unshare") is not None and (
        subprocess.run(["unshare", "-m", "sh", "-c", "mount -t tmpfs tmpfs /mnt"], check=False).returncode == 0
    )


@contextmanager
def node_with_a_disk_of_its_own(address: str, at: Path) -> Iterator[None]:
    """Start a node that has an empty disk at a path."""
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={address}", "--num-cpus=1", "--block"]
    node = subprocess.Popen(
        ["unshare", "-m", "sh", "-c", 'mount -t tmpfs tmpfs "$0" && exec "$@"', str(at), *start],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        yield
    finally:
        os.killpg(node.pid, signal.SIGTERM)
        node.wait()


@pytest.mark.skipif(not _can_mount(), reason="needs the right to mount a file system")
def test_a_worker_that_does_not_share_the_storage_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "apart.py").write_text(TARGET)
    (tmp_path / "runs").mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT / "build/types"), str(ROOT))))
    with machines(monkeypatch, 1) as cluster, node_with_a_disk_of_its_own(cluster.address, tmp_path / "runs"):
        ray.init(address=cluster.address)
        try:
            deadline = time.monotonic() + 200
            while ray.cluster_resources().get("CPU", 0) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.2)
        finally:
            ray.shutdown()
        driver = subprocess.run(
            [sys.executable, "-m", "headway.orchestrator", "fit", "apart.py"],
            cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False,
            env={**os.environ, "RAY_ADDRESS": cluster.address},
        )  # fmt: skip
    printed = driver.stdout + driver.stderr
    assert driver.returncode == 2, printed
    assert "ControllerError" not in printed
    assert f"these ranks do not see in {tmp_path}/runs/apart what the driver on" in printed
    assert "there is no such folder, or it is empty" in printed
    assert "--storage s3://..." in printed
    assert "have not come up" not in printed
    (failure,) = [each for each in read_events(Folder(str(tmp_path / "runs/apart"))) if each["event"] == "group_failed"]
    assert failure["retrying"] is False
