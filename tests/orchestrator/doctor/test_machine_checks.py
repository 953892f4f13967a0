"""Checks of one machine, with real folders, limits and mounts, and the command line that shows them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from headway.orchestrator.cli.main import main
from headway.orchestrator.doctor import machine_checks
from headway.orchestrator.doctor.machine_checks import check_storage_here, within
from headway.orchestrator.doctor.report import Finding
from headway.orchestrator.doctor.storage_checks import judge_storage, probe_storage, storage_token
from tests.s3 import s3_server

HEADWAY = [sys.executable, "-m", "headway.orchestrator"]


def check(storage: Path | str) -> Finding:
    return check_storage_here("here", str(storage), timeout_s=60)


def doctor(*command: str, **variables: str) -> tuple[int, dict[str, Any], str]:
    """Run `headway doctor --json` at the end of a shell command, and return its exit code, its document and errors."""
    environment = {**os.environ, **variables}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [*command, *HEADWAY, "doctor", "--json"], capture_output=True, text=True, check=False, env=environment
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def of(findings: dict[str, Any], check: str) -> list[dict[str, str]]:
    return [each for each in findings["findings"] if each["check"] == check]


def test_a_sound_storage_leaves_nothing_behind(tmp_path: Path) -> None:
    storage = tmp_path / "not" / "yet"
    finding = check(storage)
    assert finding.status == "ok"
    for operation in ("write", "fsync", "rename", "list", "read", "delete"):
        assert f"{operation} " in finding.found
    assert list(tmp_path.iterdir()) == []

    storage.mkdir(parents=True)
    (storage / "run").touch()
    assert check(storage).status == "ok"
    assert list(storage.iterdir()) == [storage / "run"]


def test_a_file_in_place_of_the_storage(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    finding = check(tmp_path / "file" / "runs")
    assert finding.status == "failed"
    assert "cannot be used: NotADirectoryError" in finding.found
    assert "may write" in finding.advice


def test_a_storage_that_is_not_shared(tmp_path: Path) -> None:
    (tmp_path / "driver").mkdir()
    (tmp_path / "node").mkdir()
    with storage_token(str(tmp_path / "driver")) as token:
        folder, name, text = token.arguments("node")
        elsewhere = folder.replace("/driver/", "/node/")
        absent = judge_storage("b", "/runs", probe_storage(elsewhere, name, text))
        shutil.copytree(folder, elsewhere)
        stale = judge_storage("b", "/runs", probe_storage(elsewhere, name, "another"))
    for finding in (absent, stale):
        assert finding.status == "failed"
        assert "/runs is not shared: a token that the driver wrote" in finding.found
        assert "mount the same folder at /runs on b" in finding.advice


def test_a_storage_that_fails_late_names_the_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with storage_token(str(tmp_path)) as token:
        finding = judge_storage("b", str(tmp_path), probe_storage(*token.arguments("b")))
    assert finding.status == "failed"
    assert "fsync: OSError: [Errno 28] No space left on device" in finding.found


def test_a_check_that_hangs_is_given_up() -> None:
    assert within(0.05, lambda: time.sleep(60) or Finding("a", "", "ok", "")) is None  # type: ignore[func-returns-value]


def test_the_command_prints_a_table_and_its_exit_code_counts_failures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # It starts two processes that import torch.
    monkeypatch.setattr(machine_checks, "_check_gloo", lambda here, _: Finding("gloo", here, "ok", "works"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--storage", str(tmp_path / "file")])
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 1
    assert lines[0].split() == ["STATUS", "CHECK", "NODE", "FOUND", "WHAT", "TO", "DO"]
    (storage,) = (line for line in lines if " storage " in line)
    assert storage.startswith("failed")
    assert "make it a folder" in storage
    assert lines[-1].endswith("1 failed")


@pytest.mark.parametrize("address", ["http://127.0.0.1:8265", "head", "local"])
def test_an_address_of_another_form_is_wrong_input(capsys: pytest.CaptureFixture[str], address: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--address", address])
    assert ended.value.code == 2
    assert f"headway: address={address}" in capsys.readouterr().err


@pytest.mark.extended
def test_a_sound_machine_and_its_json(tmp_path: Path) -> None:
    code, found, _ = doctor(HEADWAY_STORAGE=str(tmp_path / "runs"))
    assert (found["schema"], found["kind"]) == (1, "doctor")
    page = (Path(__file__).parents[3] / "docs/command-line.md").read_text()
    assert all(f"`{name}`" in page for name in (*found, *found["findings"][0]) if name not in ("schema", "kind"))
    assert {each["check"] for each in found["findings"]} >= {"versions", "shared memory", "limits", "storage", "gloo"}
    assert (code, of(found, "gloo")[0]["status"], of(found, "storage")[0]["status"]) == (
        int(found["status"] == "failed"), "ok", "ok",
    )  # fmt: skip


@pytest.mark.extended
def test_a_low_limit_of_open_files(tmp_path: Path) -> None:
    code, found, _ = doctor("bash", "-c", 'ulimit -n 512; exec "$0" "$@"', HEADWAY_STORAGE=str(tmp_path))
    (files,) = (each for each in of(found, "limits") if "open files" in each["found"])
    assert (code, files["status"]) == (1, "failed")
    assert files["found"].startswith("512 open files")
    assert "`ulimit -n 65536`" in files["advice"]


def may_mount() -> bool:
    command = shutil.which("unshare")
    return (
        bool(command) and not subprocess.run([str(command), "-m", "true"], capture_output=True, check=False).returncode
    )


@pytest.mark.extended
@pytest.mark.skipif(not may_mount(), reason="needs the right to mount")
def test_small_shared_memory_and_a_read_only_storage(tmp_path: Path) -> None:
    mounts = (
        f"mount -t tmpfs -o size=64m tmpfs /dev/shm && mount -t tmpfs -o ro tmpfs {tmp_path} && "
        'exec "$0" "$@"'
    )  # fmt: skip
    code, found, _ = doctor("unshare", "-m", "bash", "-c", mounts, HEADWAY_STORAGE=str(tmp_path))
    ((memory,), (storage,)) = of(found, "shared memory"), of(found, "storage")
    assert (code, memory["status"], storage["status"]) == (1, "failed", "failed")
    assert memory["found"].startswith("/dev/shm has 64 MiB")
    assert "Read-only file system" in storage["found"]


@pytest.mark.extended
def test_ray_that_cannot_be_reached(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    done = subprocess.run(
        [*HEADWAY, "doctor", "--json", "--address", f"127.0.0.1:{port}", "--storage", str(tmp_path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    (ray,) = of(json.loads(done.stdout), "Ray")
    assert (done.returncode, ray["status"]) == (1, "failed")
    assert f"cannot connect to 127.0.0.1:{port}" in ray["found"]
    assert "ray start --head" in ray["advice"]


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_bucket_with_wrong_credentials() -> None:
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    # It knows no credentials.
    with s3_server(INITIAL_NO_AUTH_ACTION_COUNT="0") as settings:
        code, found, errors = doctor(HEADWAY_STORAGE="s3://bucket/runs", **settings)
    (storage,) = of(found, "storage")
    assert (code, storage["status"]) == (1, "failed")
    assert "s3://bucket/runs cannot be used: " in storage["found"]
    assert "credentials" in storage["advice"]
    assert "not-a-secret" not in json.dumps(found) + errors
