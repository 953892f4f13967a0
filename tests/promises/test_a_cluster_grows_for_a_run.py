"""A real autoscaler starts a machine for a run that lacks resources, and stops it after the run."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.orchestrator import Run
from headway.orchestrator.runs.goodput import goodput_report
from headway.orchestrator.storage.events import Event, read_events
from headway.orchestrator.storage.folder import Folder
from tests import heads
from tests.on_ray import write_rows

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(500)]


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """A head with one CPU, whose autoscaler may start two more machines with one CPU each."""
    with heads.growing_head(tmp_path, {"CPU": 1}, machine={"resources": {"CPU": 1}, "max_workers": 2}) as port:
        yield port


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def fit(port: int, *settings: str) -> subprocess.Popen[str]:
    return heads.headway_on(port, "fit", "tests.on_ray:OnRay", *settings)


def test_a_machine_comes_for_a_run_that_waits_for_it_and_goes_after_it(port: int, tmp_path: Path) -> None:
    run_dir, data = tmp_path / "runs/run", write_rows(tmp_path / "data", 96)
    common = [f"storage={tmp_path}/runs", f"config.data={data}", "config.engine=threads", "config.global_batch_size=16"]

    def events(kind: str) -> list[Event]:
        return [each for each in read_events(Folder(str(run_dir))) if each["event"] == kind]

    # Its dashboard may answer earlier.
    heads.wait_until(lambda: len(heads.raylets(port)) == 1)
    head = heads.raylets(port)
    settings = *common, "name=run", "config.max_steps=60", "config.pause_s=0.1", "scaling.workers=2", "scaling.wait=3m"
    # A machine that comes within five seconds is not waited for in any line.
    with heads.paused_autoscaler(port):
        driver = fit(port, *settings)
        heads.wait_until(lambda: bool(events("waiting_for_machines")), driver)
    with driver:
        try:
            heads.wait_until(lambda: bool(events("training")), driver)
            both = heads.raylets(port)
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
            heads.wait_until(lambda: heads.raylets(port) == head)
            shown, _ = driver.communicate(timeout=200)
        except BaseException:
            print(heads.status(port))
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
