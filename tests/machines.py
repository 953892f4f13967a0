"""A cluster of several nodes on one machine; nodes can be added and removed during a run or sweep."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator

import pytest
from ray.cluster_utils import Cluster


def start_head(num_cpus: int) -> Cluster:
    """Start a cluster of one node, on any free ports.

    Without "dashboard_port": None, Ray tests whether port 8265 is free, and if it is not, forgets the test's socket.
    """
    head = {"num_cpus": num_cpus, "include_dashboard": False, "dashboard_port": None}
    return Cluster(initialize_head=True, head_node_args=head)


@contextlib.contextmanager
def machines(monkeypatch: pytest.MonkeyPatch, count: int) -> Iterator[Cluster]:
    """Start a head without room for workers, and nodes with one CPU each."""
    # Separate, or every ray.init() on this machine would find this cluster. Short, because it contains sockets.
    rays_files = tempfile.mkdtemp(prefix="hw-")
    monkeypatch.setenv("RAY_TMPDIR", rays_files)
    # The machine may be busy.
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "180")
    cluster = start_head(num_cpus=0)
    try:
        for _ in range(count):
            cluster.add_node(num_cpus=1)
        yield cluster
    finally:
        cluster.shutdown()
        shutil.rmtree(rays_files, ignore_errors=True)
