"""Checks of the Ray to which the driver is connected, with one node."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.orchestrator import StorageError
from headway.orchestrator.doctor.cluster_checks import check_connected
from headway.orchestrator.doctor.preflight import preflight
from headway.orchestrator.doctor.probes import live_nodes

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]


def test_the_node_is_checked_and_nothing_remains(tmp_path: Path) -> None:
    findings = check_connected(str(tmp_path), timeout_s=120)
    (node,) = live_nodes()
    checks = {each.check for each in findings if each.node == node.name}
    assert checks >= {"versions", "shared memory", "limits", "clock", "storage", "tokens"}
    assert [each for each in findings if each.check in ("versions", "clock", "storage") and each.status != "ok"] == []
    assert list(tmp_path.iterdir()) == []


def test_one_node_needs_no_preflight(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    preflight(str(tmp_path / "file"))


def test_a_storage_that_cannot_be_written_fails_the_preflight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    # As from a driver on another node.
    monkeypatch.setattr(type(ray.get_runtime_context()), "get_node_id", lambda _: "another")
    (tmp_path / "file").touch()
    preflight(str(tmp_path), timeout_s=120)
    with pytest.raises(StorageError, match="the cluster is not ready for this run:\n.*NotADirectoryError.*may write"):
        preflight(str(tmp_path / "file"), timeout_s=120)
