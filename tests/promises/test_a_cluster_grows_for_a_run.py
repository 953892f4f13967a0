"""A real autoscaler starts a machine for a run that lacks resources, and stops it after the run."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ray.util import get_node_ip_address

from headway.orchestrator import Run
from headway.orchestrator.runs.goodput import goodput_report
from headway.orchestrator.storage.events import Event, read_events
from headway.orchestrator.storage.folder import Folder
from tests import heads
from tests.on_ray import write_rows

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(500)]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """A head with one CPU, whose autoscaler may start two more machines with one CPU each, as local processes.

    Ray's `AutoscalingCluster` is unsuitable: it stops every Ray on the machine before and after, and reads the
    defaults of its provider from a file that is not in Ray's wheel. An "external" provider needs none.
    """
    (port,) = heads.free_ports(1)
    config = {
        "cluster_name": "test",
        "max_workers": 2,
        "idle_timeout_minutes": 0.1,
        "provider": {
            "type": "external",
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "gcs_address": f"{get_node_ip_address()}:{port}",
            # All machines have the same address.
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
            "machine": {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": 2},
        },
        **dict.fromkeys(("file_mounts", "auth"), {}),
        **dict.fromkeys(("cluster_synced_files", "setup_commands", "head_setup_commands", "worker_setup_commands"), []),
        **dict.fromkeys(("initialization_commands", "head_start_ray_commands", "worker_start_ray_commands"), []),
    }
    file = tmp_path / "autoscaling.json"
    file.write_text(json.dumps(config))
    variables = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", "PYTHONPATH": os.environ["PYTHONPATH"]}
    # Workers must be children of their raylet, which tells the machine.
    variables["HEADWAY_TESTS_ZYGOTE"] = ""
    with heads.head(f"--autoscaling-config={file}", f"--port={port}", num_cpus=1, **variables):
        yield port


def machines(port: int) -> set[int]:
    """The processes that stand for the machines of the cluster."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes().split(b"\0")
            if command[0].endswith(b"/raylet") and any(f":{port}".encode() in each for each in command):
                found.add(int(folder.name))
    return found


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def fit(port: int, *settings: str) -> subprocess.Popen[str]:
    path = os.pathsep.join((str(ROOT / "build/types"), str(ROOT)))
    return subprocess.Popen(
        [sys.executable, "-m", "headway.orchestrator", "fit", "tests.on_ray:OnRay", *settings],
        env={**heads.environment(), "RAY_ADDRESS": f"127.0.0.1:{port}", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def wait_until(holds: Callable[[], bool], driver: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + 200
    while not holds():
        if driver is not None and (driver.poll() is not None or time.monotonic() > deadline):
            driver.kill()
            raise AssertionError(f"the driver has ended, or is late: {driver.communicate()[0]}")
        assert time.monotonic() < deadline, "late"
        time.sleep(0.1)


def status(port: int) -> str:
    """Return the autoscaler's report, to understand a failure."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "status", "--verbose", f"--address=127.0.0.1:{port}"]
    shown = subprocess.run(command, env=heads.environment(), capture_output=True, text=True, check=False, timeout=300)
    return shown.stdout + shown.stderr


def test_a_machine_comes_for_a_run_that_waits_for_it_and_goes_after_it(port: int, tmp_path: Path) -> None:
    run_dir, data = tmp_path / "runs/run", write_rows(tmp_path / "data", 96)
    common = [f"storage={tmp_path}/runs", f"config.data={data}", "config.engine=threads", "config.global_batch_size=16"]

    def events(kind: str) -> list[Event]:
        return [each for each in read_events(Folder(str(run_dir))) if each["event"] == kind]

    # Its dashboard may answer earlier.
    wait_until(lambda: len(machines(port)) == 1)
    head = machines(port)
    driver = fit(port, *common, "name=run", "config.max_steps=60", "config.pause_s=0.1", "scaling.workers=2",
                 "scaling.wait=3m")  # fmt: skip
    with driver:
        try:
            wait_until(lambda: bool(events("training")), driver)
            both = machines(port)
            workers = events("attempt_started")[0]["workers"]
            assert len(both) == 2
            assert {parent_of(worker["pid"]) for worker in workers} == both
            shown, _ = driver.communicate(timeout=200)
        finally:
            driver.kill()
    assert driver.returncode == 0, shown
    assert "waiting for 2 workers: 1 fits (1 CPU free of 1)\n" in shown
    run = Run(str(run_dir))
    assert (run.status, run.record.steps, run.record.attempts, run.record.failures) == ("completed", 60, 1, 0)
    assert goodput_report(read_events(run.folder)).seconds["waiting for machines"] > 0

    # A resource that no machine of the cluster will ever have.
    driver = fit(port, *common, "name=late", "config.max_steps=1", "scaling.gpus_per_worker=1", "scaling.wait=8s")
    with driver:
        try:
            wait_until(lambda: machines(port) == head)
            shown, _ = driver.communicate(timeout=200)
        except BaseException:
            print(status(port))
            raise
        finally:
            driver.kill()
    assert driver.returncode == 2, shown
    assert "waiting for 1 worker: none fits (1 CPU free of " in shown
    assert (
        "timed out after 8s waiting for the workers: the cluster has 0 of 1 GPU; to wait longer, set scaling.wait"
        in shown
    )
    assert Run(str(tmp_path / "runs/late")).status != "completed"
