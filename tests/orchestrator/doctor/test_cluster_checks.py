"""Checks of real Ray clusters of several nodes on one machine: sound, and broken in ways that a cluster breaks."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from headway.orchestrator import StorageError
from headway.orchestrator.doctor.cluster_checks import check_connected
from headway.orchestrator.doctor.preflight import preflight
from headway.orchestrator.doctor.report import Finding
from headway.trainer.errors import ConfigError
from tests.heads import descendants, end, environment, free_ports, head, start_of
from tests.machines import start_head

from .test_machine_checks import HEADWAY, may_mount, of

pytestmark = [pytest.mark.ray, pytest.mark.extended]


def failed(findings: list[Finding]) -> list[Finding]:
    return [each for each in findings if each.status == "failed"]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A head to which this process is connected."""
    # Separate, or every ray.init() on this machine would find this cluster. Short, because it contains sockets.
    rays_files = tempfile.mkdtemp(prefix="hw-")
    monkeypatch.setenv("RAY_TMPDIR", rays_files)
    # The shared one of the session, if there is one, is another cluster.
    ray.shutdown()
    cluster = start_head(num_cpus=1)
    try:
        ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(rays_files, ignore_errors=True)


@contextlib.contextmanager
def node(cluster: Cluster, *command: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Add a node to a cluster by `ray start`, at the end of another command, and wait for it."""
    alive = sum(each["Alive"] for each in ray.nodes())
    start = [
        str(Path(sys.executable).parent / "ray"), "start", f"--address={cluster.address}", "--block", "--num-cpus=1",
        f"--dashboard-agent-listen-port={free_ports(1)[0]}", "--disable-usage-stats",
    ]  # fmt: skip
    # Its workers must not be forked from the warm process, which has the mounts, limits and path of the tests.
    outer = {name: value for name, value in os.environ.items() if name != "HEADWAY_TESTS_ZYGOTE"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, *start], env={**outer, **variables}, stdout=log, stderr=log, start_new_session=True
        )
        try:
            while sum(each["Alive"] for each in ray.nodes()) == alive:
                if process.poll() is not None:
                    log.seek(0)
                    raise AssertionError(log.read().decode())
                time.sleep(0.2)
            yield process
        finally:
            end(process)


def other_name() -> str:
    """Return the name of the node that is not the driver's."""
    from headway.orchestrator.doctor.probes import live_nodes

    return live_nodes()[-1].name


def test_two_sound_nodes(cluster: Cluster, tmp_path: Path) -> None:
    cluster.add_node(num_cpus=1)
    findings = check_connected(str(tmp_path), timeout_s=60)
    assert failed(findings) == []
    counts = {check: sum(each.check == check for each in findings) for check in ("versions", "clock", "ports", "gloo")}
    assert counts == {"versions": 2, "clock": 2, "ports": 2, "gloo": 2}
    # The driver's, and one of each node.
    assert sum(each.check == "storage" for each in findings) == 3
    assert list(tmp_path.iterdir()) == []
    preflight(str(tmp_path))


@pytest.mark.skipif(not may_mount(), reason="needs the right to mount")
def test_a_node_that_sees_another_folder_at_the_path_of_the_storage(cluster: Cluster, tmp_path: Path) -> None:
    mounted = ("unshare", "-m", "bash", "-c", 'mount -t tmpfs tmpfs "$0" && exec "$@"', str(tmp_path))
    with node(cluster, *mounted):
        name = other_name()
        (finding,) = failed(check_connected(str(tmp_path), timeout_s=60))
        assert (finding.check, finding.node) == ("storage", name)
        assert f"{tmp_path} is not shared" in finding.found
        with pytest.raises(StorageError, match=f"{name}: {tmp_path} is not shared.* use a URI"):
            preflight(str(tmp_path))
        # Too small for a worker, so it is not asked.
        preflight(str(tmp_path), worker_resources={"CPU": 1000})


def test_a_node_with_another_version_of_torch_and_low_limits(cluster: Cluster, tmp_path: Path) -> None:
    other = tmp_path / "other" / "torch-9.9.9.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9.9\n")
    path = os.pathsep.join((str(other.parent), os.environ["PYTHONPATH"]))
    low = ("bash", "-c", 'ulimit -Sn 900; ulimit -Hn 900; exec "$0" "$@"')
    with node(cluster, *low, PYTHONPATH=path):
        name = other_name()
        version, files = failed(check_connected(str(tmp_path), timeout_s=60))
        assert (version.check, version.node, files.check, files.node) == ("versions", name, "limits", name)
        assert f"torch is 9.9.9 on {name}, but 2." in version.found
        assert "900 open files" in files.found
        with pytest.raises(ConfigError, match=f"torch is 9.9.9 on {name}, but 2.* in the driver; install torch 2"):
            preflight(str(tmp_path))


def test_a_node_that_does_not_answer_and_then_is_dead(cluster: Cluster, tmp_path: Path) -> None:
    with node(cluster) as process:
        name = other_name()
        theirs = descendants(process.pid)
        raylet = next(pid for pid in theirs if Path(f"/proc/{pid}/comm").read_text().strip() == "raylet")
        os.kill(raylet, signal.SIGSTOP)
        # On a busy machine, the head may also need longer to start its process.
        found = {finding.node: finding for finding in failed(check_connected(str(tmp_path), timeout_s=3))}
        assert (found[name].check, found[name].found) == ("node", "no answer within 3 s")
        os.kill(raylet, signal.SIGKILL)
        while all(each["Alive"] for each in ray.nodes()):
            time.sleep(0.2)
        findings = check_connected(str(tmp_path), timeout_s=60)
        assert failed(findings) == []
        (lost,) = (each for each in findings if each.check == "nodes")
        assert lost.status == "warning"
        assert "1 lost without notice" in lost.found
        for pid, started in theirs.items():
            if start_of(pid) == started:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_the_command_on_a_cluster_with_a_right_and_a_wrong_token(tmp_path: Path) -> None:
    port = free_ports(1)[0]

    def doctor(**variables: str) -> tuple[int, dict[str, Any], str]:
        done = subprocess.run(
            [*HEADWAY, "doctor", "--json", "--address", f"127.0.0.1:{port}", "--storage", str(tmp_path)],
            capture_output=True, text=True, check=False,
            env={**environment(), "PYTHONPATH": os.environ["PYTHONPATH"], **variables},
        )  # fmt: skip
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout), done.stdout + done.stderr

    with head(f"--port={port}", num_cpus=1):
        code, found, _ = doctor()
        assert (code, [each["status"] for each in of(found, "dashboard")]) == (0, ["ok"])
        for variables, message in (
            ({"RAY_AUTH_TOKEN": "f" * 64}, "refuses this Ray auth token"),
            ({"RAY_AUTH_MODE": "disabled"}, "needs a Ray auth token"),
        ):
            code, found, text = doctor(**variables)
            (connection,) = of(found, "Ray")
            assert (code, connection["status"]) == (1, "failed")
            assert message in connection["found"]
            assert "f" * 64 not in text
