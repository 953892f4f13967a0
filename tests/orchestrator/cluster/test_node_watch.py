"""`headway node watch`: the notices of three clouds, their absence, and SIGTERM."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest
from click.testing import CliRunner

from headway.orchestrator.cli.main import main
from headway.orchestrator.cluster import node_watch
from headway.orchestrator.cluster.cloud_notices import CLOUDS, MetadataService, Notice, find_service
from tests.metadata import MetadataStandIn

AWS = "/latest/meta-data"
AZURE = "/metadata/scheduledevents?api-version=2020-07-01"
# Fixed, because it is in the names of tests.
SOON = datetime(2100, 1, 1, tzinfo=UTC)
REBALANCE = json.dumps({"noticeTime": "2026-11-05T08:22:00Z"})


@contextmanager
def stand_in(cloud: str, **pages: str) -> Iterator[MetadataStandIn]:
    server = MetadataStandIn(cloud)
    try:
        yield server
    finally:
        server.close()


def azure_event(kind: str, machine: str, **more: str) -> str:
    event = {"EventId": "1", "EventType": kind, "ResourceType": "VirtualMachine", "Resources": [machine], **more}
    return json.dumps({"DocumentIncarnation": 2, "Events": [event]})


@pytest.mark.parametrize(
    ("cloud", "path", "page", "reason"),
    [
        (
            "aws", f"{AWS}/spot/instance-action",
            json.dumps({"action": "terminate", "time": SOON.strftime("%Y-%m-%dT%H:%M:%SZ")}),
            "EC2 spot interruption (terminate)",
        ),
        (
            "azure", AZURE,
            azure_event("Preempt", "vm-0", NotBefore=format_datetime(SOON, usegmt=True), EventStatus="Scheduled"),
            "Azure scheduled event (Preempt)",
        ),
    ],
)  # fmt: skip
def test_a_notice_has_its_time(cloud: str, path: str, page: str, reason: str) -> None:
    with stand_in(cloud) as server:
        service = find_service("auto", server.url)
        assert service is not None
        assert service.cloud == cloud
        assert service.notice() is None
        server.pages[path] = page
        notice = service.notice()
    assert notice is not None
    assert notice.reason == reason
    assert notice.left_s is not None
    at = datetime.now(UTC) + timedelta(seconds=notice.left_s)
    assert (at - SOON).total_seconds() == pytest.approx(0, abs=60)


def test_compute_engine_gives_thirty_seconds() -> None:
    with stand_in("gcp") as server:
        service = find_service("auto", server.url)
        assert service is not None
        assert (service.cloud, service.notice()) == ("gcp", None)
        server.pages["/computeMetadata/v1/instance/preempted"] = "TRUE"
        notice = service.notice()
    assert notice is not None
    assert (notice.reason, notice.left_s) == ("Compute Engine preemption", 30.0)


def test_a_rebalance_recommendation_is_a_notice_only_if_asked() -> None:
    with stand_in("aws") as server:
        server.pages[f"{AWS}/events/recommendations/rebalance"] = REBALANCE
        assert MetadataService("aws", server.url).notice() is None
        notice = MetadataService("aws", server.url, counts_rebalance=True).notice()
    assert notice is not None
    assert (notice.reason, notice.left_s) == ("EC2 rebalance recommendation", None)


def test_an_expired_token_is_replaced() -> None:
    with stand_in("aws") as server:
        service = MetadataService("aws", server.url)
        assert service.notice() is None
        server.token = "another"
        with pytest.raises(urllib.error.HTTPError):
            service.notice()
        assert service.notice() is None


@pytest.mark.parametrize(
    "page",
    [
        azure_event("Preempt", "another-vm", NotBefore=format_datetime(SOON, usegmt=True)),
        azure_event("Freeze", "vm-0", NotBefore=format_datetime(SOON, usegmt=True)),
    ],
)
def test_events_of_azure_that_do_not_take_this_machine_away_are_ignored(page: str) -> None:
    with stand_in("azure") as server:
        server.pages[AZURE] = page
        assert MetadataService("azure", server.url).notice() is None


def test_an_event_of_azure_that_has_started_leaves_no_time() -> None:
    with stand_in("azure") as server:
        server.pages[AZURE] = azure_event("Terminate", "vm-0", NotBefore="", EventStatus="Started")
        notice = MetadataService("azure", server.url).notice()
    assert notice is not None
    assert notice.left_s == 0.0


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_service_that_does_not_answer(cloud: str) -> None:
    with stand_in(cloud) as server:
        url = server.url
    assert find_service("auto", url) is None
    with pytest.raises(OSError, match="refused"):
        MetadataService(cloud, url).notice()  # type: ignore[arg-type]


@contextmanager
def raw_service(answer: bytes) -> Iterator[str]:
    """Answer every connection with these bytes; yields the address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection, suppress(OSError):
                        connection.recv(4096)
                        connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            thread.join(10)


@pytest.mark.parametrize("cloud", ["aws", "azure"])
@pytest.mark.parametrize(
    "answer",
    [
        b"no HTTP\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 200\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n\xff\xfe",
    ],
)
def test_an_answer_that_no_cloud_gives_does_not_end_the_watcher(cloud: str, answer: bytes) -> None:
    """`node watch` logs these two kinds of errors, and continues."""
    with raw_service(answer) as url:
        with pytest.raises((OSError, ValueError)):
            MetadataService(cloud, url).notice()  # type: ignore[arg-type]
        find_service("auto", url)


def test_proxies_are_bypassed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with stand_in("gcp") as server:
        assert MetadataService("gcp", server.url).notice() is None


def test_wrong_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--cloud", "oracle"], "--cloud must be auto, none, aws, gcp, azure; got 'oracle'"),
        (["--grace", "3 steps"], "--grace must be a time such as 90s, got '3 steps'"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["node", "watch", "--node-id", "x", *arguments])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err


def test_rays_command_has_the_options() -> None:
    """It is hidden: see `drain_node`."""
    from ray.scripts.scripts import cli

    shown = CliRunner().invoke(cli, ["drain-node", "--help"]).output
    for option in ("--node-id", "--reason-message", "--deadline-remaining-seconds", "DRAIN_NODE_REASON_PREEMPTION"):
        assert option in shown


def test_a_service_that_is_silent_at_the_start_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drained: list[Notice] = []
    ended, terminated = threading.Event(), threading.Event()

    def drain(node_id: str, address: str, notice: Notice) -> None:
        drained.append(notice)
        ended.set()

    monkeypatch.setattr(node_watch, "_FIND_EVERY_S", 0.0)
    monkeypatch.setattr(node_watch, "POLL_S", 0.01)
    monkeypatch.setattr(node_watch, "_start_drain", drain)
    with stand_in("gcp") as server:
        server.pages["/computeMetadata/v1/instance/preempted"] = "TRUE"
        options = node_watch.WatchOptions(metadata_url=server.url)
        node_watch._watch(None, "node", options, ended, terminated)
    assert [notice.reason for notice in drained] == ["Compute Engine preemption"]
    assert "watching for notices of gcp, too" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_wait_for_ray(number: signal.Signals, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    program = f"""
import sys
from headway.orchestrator.cli.main import main
from headway.orchestrator.cluster import node_watch
node_watch._NODE_ID = "import time; open({str(asked)!r}, 'w').close(); time.sleep(600)"
main(["node", "watch", "--cloud", "none"])
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        try:
            while not asked.exists():
                assert process.poll() is None
                time.sleep(0.05)
            process.send_signal(number)
            # Below the 30 s that one attempt to reach Ray may take.
            out, _ = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 0
    assert "ended before Ray has come up" in out


def test_the_watcher_imports_neither_torch_nor_ray() -> None:
    program = (
        "import sys\nfrom headway.orchestrator.cli.main import main\n"
        "try:\n    main(['node', 'watch', '--cloud', 'oracle'])\nexcept SystemExit:\n    pass\n"
        "sys.exit(', '.join({'torch', 'ray', 'numpy'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_sigterm_drains_the_node_and_a_second_one_ends_the_wait(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-m", "headway.orchestrator", "node", "watch", "--cloud", "none", "--node-id", "ab" * 28]
    with log.open("w") as out:
        process = subprocess.Popen([*command, "--address", "127.0.0.1:9"], stdout=out, stderr=out)
    try:
        for wanted in ("watching for SIGTERM; node abab", "SIGTERM, 90 s left: draining node abab"):
            while wanted not in log.read_text():
                assert process.poll() is None
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
