"""A cluster of several nodes on one machine; nodes can be added and removed during a run or sweep."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator

import pytest
from ray.cluster_utils import Cluster


@contextlib.contextmanager
def machines(monkeypatch: pytest.MonkeyPatch, count: int) -> Iterator[Cluster]:
    """Start a head without room for workers, and nodes with one CPU each."""
    # Separate, or every ray.init() on this machine would find this cluster. Short, because it contains sockets.
    rays_files = tempfile.mkdtemp(prefix="hw-")
    monkeypatch.setenv("RAY_TMPDIR", rays_files)
    # The machine may be busy.
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "180")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(count):
            cluster.add_node(num_cpus=1)
        yield cluster
    finally:
        cluster.shutdown()
        shutil.rmtree(rays_files, ignore_errors=True)
