"""A cluster of several nodes on one machine; nodes can be added and removed during a run or sweep."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest
from ray._private import services
from ray.cluster_utils import Cluster

_START_S = 240.0


class PatientCluster(Cluster):
    """A cluster that waits four minutes for a node. Ray gives up after 30 s, too soon on a busy machine."""

    def add_node(self, wait: bool = True, **node_args: Any) -> Any:
        """Start a node, and wait until it is there, unless `wait` is False."""
        get_node = services.get_node

        def get_node_patiently(*args: Any) -> Any:
            until_s = time.monotonic() + _START_S
            while True:
                try:
                    return get_node(*args)
                except RuntimeError:
                    if time.monotonic() > until_s:
                        raise
                time.sleep(0.2)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(services, "get_node", get_node_patiently)
            node = super().add_node(wait=False, **node_args)
        if wait:
            self._wait_for_node(node, timeout=_START_S)
        return node


def start_head(num_cpus: int) -> Cluster:
    """Start a cluster of one node, on any free ports.

    Without "dashboard_port": None, Ray tests whether port 8265 is free, and if it is not, forgets the test's socket.
    """
    head = {"num_cpus": num_cpus, "include_dashboard": False, "dashboard_port": None}
    return PatientCluster(initialize_head=True, head_node_args=head)


@contextlib.contextmanager
def machines(monkeypatch: pytest.MonkeyPatch, count: int) -> Iterator[Cluster]:
    """Start a head without room for workers, and nodes with one CPU each."""
    # Separate, or every ray.init() on this machine would find this cluster. Short, because it contains sockets.
    rays_files = tempfile.mkdtemp(prefix="hw-")
    monkeypatch.setenv("RAY_TMPDIR", rays_files)
    cluster = start_head(num_cpus=0)
    try:
        for _ in range(count):
            cluster.add_node(num_cpus=1)
        yield cluster
    finally:
        cluster.shutdown()
        shutil.rmtree(rays_files, ignore_errors=True)
