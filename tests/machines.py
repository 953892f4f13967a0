"""A cluster of several nodes on one machine, which can be added to it and taken away under a run or a sweep."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator

import pytest
from ray.cluster_utils import Cluster


@contextlib.contextmanager
def machines(monkeypatch: pytest.MonkeyPatch, count: int) -> Iterator[Cluster]:
    """Starts a head that holds no worker, and so many nodes of one CPU."""
    # Or whoever calls ray.init() on this machine would find this cluster. Short: sockets lie in it.
    rays_files = tempfile.mkdtemp(prefix="hw-")
    monkeypatch.setenv("RAY_TMPDIR", rays_files)
    # For the machine may be busy.
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "180")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(count):
            cluster.add_node(num_cpus=1)
        yield cluster
    finally:
        cluster.shutdown()
        shutil.rmtree(rays_files, ignore_errors=True)
