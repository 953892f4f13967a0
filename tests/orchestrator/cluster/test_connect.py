"""Starting Ray on this machine: it is on loopback, signals end the wait, and a failed start is one sentence."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from headway.orchestrator import Run, Scaling
from headway.orchestrator.cluster import own_ray
from headway.orchestrator.cluster.connect import (
    free_node_resources,
    live_node_resources,
    placed_groups,
    ray_connection,
)
from headway.orchestrator.cluster.ray_env import quiet_environment
from headway.trainer.errors import HeadwayError
from tests.promises.test_ctrl_c_loses_nothing import TARGET

_LISTENING = "0A"


def test_a_failed_start_of_ray_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: Any) -> None:
        raise Exception("The current node timed out during startup.\nThis could happen because ...")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with (
        pytest.raises(HeadwayError, match=r"could not start .*timed out") as error,
        ray_connection(Scaling(), verbose=False),
    ):
        raise AssertionError("there is no Ray")
    assert "\n" not in str(error.value)


def test_ray_is_given_minutes_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    register, start = "RAY_agent_register_timeout_ms", "RAY_raylet_start_wait_time_s"
    monkeypatch.delenv(register, raising=False)
    monkeypatch.setenv(start, "7")
    quiet_environment()
    assert int(os.environ[register]) >= 240_000
    assert os.environ[start] == "7", "the user's choice"


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    (tmp_path / "line.py").write_text(TARGET)
    process = subprocess.Popen(
        [sys.executable, "-m", "headway.orchestrator", "fit", "line.py", "scaling.workers=2",
         "scaling.cpus_per_worker=0.5", "config.max_steps=1000000", f"storage={tmp_path}/runs"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path, start_new_session=True,
        env={**{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.ray
@pytest.mark.extended
def test_a_raylet_that_dies_while_starting_is_told_in_one_sentence(driver: subprocess.Popen[str]) -> None:
    os.kill(wait_for(lambda: child(driver.pid, "raylet"), driver), signal.SIGKILL)
    out, _ = driver.communicate(timeout=60)
    assert driver.returncode == 1
    (line,) = (each for each in out.splitlines() if each.startswith("headway: "))
    assert line.startswith("headway: Ray could not start on this machine: its process raylet ended")
    assert "RAY_ADDRESS=auto" in line
    assert "Traceback" not in out


@pytest.mark.ray
@pytest.mark.extended
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait_for_ray(driver: subprocess.Popen[str], number: signal.Signals, tmp_path: Path) -> None:
    raylet = wait_for(lambda: child(driver.pid, "raylet"), driver)
    os.kill(raylet, signal.SIGSTOP)
    driver.send_signal(number)
    out, _ = driver.communicate(timeout=60)
    assert driver.returncode == 128 + number, out
    assert "before training began" in out
    assert Run(str(tmp_path / "runs/line")).record.status == "interrupted"
    wait_for(lambda: not running(raylet))


@pytest.mark.ray
@pytest.mark.extended
def test_the_ray_of_a_run_and_its_workers_listen_on_loopback_only(
    driver: subprocess.Popen[str], tmp_path: Path
) -> None:
    record = tmp_path / "runs/line/metrics.jsonl"
    wait_for(lambda: record.exists() and record.read_text(), driver)
    pids = [driver.pid, *descendants(driver.pid)]
    names = {Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids}
    assert {"raylet", "gcs_server"} <= names
    assert len([name for name in names if name.startswith("ray::")]) > 2, names
    listening = {pid: listening_addresses(pid) for pid in pids}
    assert listening[child(driver.pid, "gcs_server")]
    assert {str(each) for found in listening.values() for each in found if not each.is_loopback} == set(), listening


_STRANGER = """
import sys
import ray
ray.init(sys.argv[1], log_to_driver=False, configure_logging=False)
group = ray.util.placement_group([{"CPU": 1}])
assert group.wait(60)
print("placed", flush=True)
sys.stdin.read()
"""


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_placement_groups_of_other_jobs_do_not_count() -> None:
    mine = ray.util.placement_group([{"CPU": 1}])
    assert mine.wait(60)
    address = ray.get_runtime_context().gcs_address
    with subprocess.Popen(
        [sys.executable, "-c", _STRANGER, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "placed\n"
        assert len(ray.util.placement_group_table()) > 1
        assert placed_groups() == {mine.id.hex()}
    ray.util.remove_placement_group(mine)


def wait_for(condition: Callable[[], Any], driver: subprocess.Popen[str] | None = None) -> Any:
    deadline = time.monotonic() + 200
    while not (found := condition()):
        assert time.monotonic() < deadline
        if driver is not None and driver.poll() is not None:
            pytest.fail(f"the driver ended with {driver.returncode}:\n{driver.communicate()[0]}")
        time.sleep(0.01)
    return found


def descendants(pid: int) -> list[int]:
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += map(int, task.read_text().split())
    return [each for child in children for each in (child, *descendants(child))]


def child(pid: int, name: str) -> int:
    """Return a descendant by the name of its program; 0 if there is none."""
    for each in descendants(pid):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{each}/comm").read_text().strip() == name:
                return each
    return 0


def running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def listening_addresses(pid: int) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Return the addresses on which a process listens."""
    sockets = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(link))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING and f"socket:[{fields[9]}]" in sockets:
                found.append(_address(fields[1].partition(":")[0]))
    return found


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    words = bytes.fromhex(text)
    # Each word of four bytes is in the machine's order, which is little-endian on all machines of the tests.
    packed = b"".join(words[start : start + 4][::-1] for start in range(0, len(words), 4))
    address = ipaddress.ip_address(packed)
    return getattr(address, "ipv4_mapped", None) or address


@pytest.mark.ray
def test_the_free_resources_are_known_node_by_node(ray_session: None) -> None:
    assert len(free_node_resources(Scaling())) == len(live_node_resources(Scaling())) == 1
    deadline = time.monotonic() + 60
    # Processes of other tests may still be ending.
    while free_node_resources(Scaling())[0].get("CPU") != ray.available_resources().get("CPU"):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_without_the_private_call_the_free_resources_are_those_of_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 6.0})
    monkeypatch.delattr("ray._private.state.available_resources_per_node")
    assert free_node_resources(Scaling()) == [{"CPU": 6.0}]


def test_a_ray_without_the_constant_for_loopback_starts_and_says_that_it_listens_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("ray._private.ray_constants.ENABLE_RAY_CLUSTER")
    monkeypatch.setattr(own_ray, "is_on_loopback", lambda: False)
    with pytest.warns(RuntimeWarning, match="listens on all network interfaces"), own_ray.on_loopback():
        pass
