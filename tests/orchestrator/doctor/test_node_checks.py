"""What the facts of a node mean: thresholds, advice, and that no secret is shown."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from headway.orchestrator.doctor.node_checks import (
    judge_clock,
    judge_gpus,
    judge_limits,
    judge_shared_memory,
    judge_tokens,
    judge_versions,
)
from headway.orchestrator.doctor.node_facts import gpus, node_facts, package_versions, tokens
from headway.orchestrator.doctor.report import Finding, document, exit_code, redact, summary

HERE = {"python": "3.11.7", "torch": "2.13.0", "ray": "2.60.0", "headway": "0.1.0"}


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({}, "ok"),
        ({"python": "3.11.9"}, "warning"),
        ({"python": "3.12.1"}, "failed"),
        ({"torch": "2.13.0+cu130"}, "warning"),
        ({"torch": "2.12.0"}, "failed"),
        ({"ray": "2.60.1"}, "failed"),
        ({"headway": "0.2.0"}, "failed"),
        ({"headway": None}, "failed"),
    ],
)
def test_versions_are_compared_with_those_of_the_driver(change: dict[str, str | None], status: str) -> None:
    (finding,) = judge_versions("node-a", HERE, {**HERE, **change})
    assert finding.status == status
    for name, there in change.items():
        assert f"{name} is {there or 'absent'} on node-a, but {HERE[name]} in the driver" in finding.found
        assert f"install {name} {HERE[name]} on node-a" in finding.advice


@pytest.mark.parametrize(
    ("total", "free", "status"),
    [(8 << 30, 7 << 30, "ok"), (1 << 30, 1 << 30, "warning"), (64 << 20, 64 << 20, "failed"), (8 << 30, 0, "failed")],
)
def test_shared_memory(total: int, free: int, status: str) -> None:
    finding = judge_shared_memory("a", {"total": total, "free": free})
    assert finding.status == status
    assert ("--shm-size" in finding.advice) == (status != "ok")


@pytest.mark.parametrize(("soft", "status"), [(-1, "ok"), (65536, "ok"), (4096, "warning"), (256, "failed")])
def test_limits(soft: int, status: str) -> None:
    (finding,) = judge_limits("a", {"open files": [soft, -1]})
    assert finding.status == status
    assert ("ulimit -n" in finding.advice) == (status != "ok")


@pytest.mark.parametrize(
    ("skew_s", "uncertainty_s", "status"),
    [(0.2, 0.001, "ok"), (-3.0, 0.01, "warning"), (3.0, 2.5, "ok"), (90.0, 0.1, "failed"), (-3600.0, 0.1, "failed")],
)
def test_only_the_skew_beyond_the_uncertainty_counts(skew_s: float, uncertainty_s: float, status: str) -> None:
    finding = judge_clock("a", skew_s, uncertainty_s)
    assert finding.status == status
    assert f"± {1000 * uncertainty_s:.1f} ms" in finding.found


def command(folder: Path, name: str, script: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize(
    ("smi", "log", "status", "found"),
    [
        ("echo '0, NVIDIA H200, 0, 0, 0'", "true", "ok", "1 x NVIDIA H200, no uncorrected ECC errors, no Xid errors"),
        ("echo '0, NVIDIA L4, [N/A], [N/A], [N/A]'", "exit 1", "ok", "kernel log not readable"),
        ("echo '1, NVIDIA H200, 3, 0, 0'", "true", "failed", "GPU 1 (NVIDIA H200): 3 uncorrected ECC errors"),
        ("echo '1, NVIDIA H200, 0, 0, 1'", "true", "failed", "could not be remapped"),
        ("echo '0, NVIDIA H200, 0, 0, 0'", "echo '[1.0] NVRM: Xid (PCI:0000:01:00): 79, gone'", "warning", "79, gone"),
        ("echo 'Unable to determine the device handle'; exit 9", "true", "failed", "Unable to determine"),
    ],
)
def test_gpus_as_nvidia_s_tools_report_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, smi: str, log: str, status: str, found: str
) -> None:
    command(tmp_path, "nvidia-smi", smi)
    command(tmp_path, "dmesg", log)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (finding,) = judge_gpus("a", gpus())
    assert finding.status == status
    assert found in finding.found


def test_a_machine_without_gpus_has_no_row_for_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert judge_gpus("a", gpus()) == []


def test_tokens_are_present_or_absent_and_never_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    ray, wandb = judge_tokens("a", tokens())
    assert (ray.status, wandb.status) == ("failed", "ok")
    assert "~/.ray/auth_token" in ray.advice

    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret-of-ray")
    monkeypatch.setenv("WANDB_API_KEY", "secret-of-wandb")
    facts: dict[str, Any] = node_facts()
    findings = judge_tokens("a", facts["tokens"])
    assert [each.status for each in findings] == ["ok", "ok"]
    assert all("present" in each.found for each in findings)
    assert "secret-of" not in json.dumps([facts, document(findings)])


def test_credentials_of_urls_are_not_shown() -> None:
    assert redact("s3://key:pass@bucket/runs\n  failed") == "s3://***@bucket/runs failed"


def test_an_absent_package_is_reported_as_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.orchestrator.doctor import node_facts as module

    monkeypatch.setattr(module, "PACKAGES", ("no-such-package", "ray"))
    found = package_versions()
    assert found["no-such-package"] is None
    assert found["ray"]


def test_only_a_failed_check_fails_the_whole() -> None:
    ok, warning, failed = (Finding("a", "", status, "") for status in ("ok", "warning", "failed"))
    assert (exit_code([ok, warning]), exit_code([ok, failed, warning])) == (0, 1)
    assert document([ok, warning])["status"] == "warning"
    assert summary([ok, ok, warning]) == "2 ok, 1 warning, 0 failed"
