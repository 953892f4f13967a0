"""`headway node watch`: the notices of three clouds, their absence, and SIGTERM."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest
from click.testing import CliRunner

from headway.orchestrator.cli.main import main
from headway.orchestrator.cluster.cloud_notices import CLOUDS, MetadataService, find_service
from tests.metadata import MetadataStandIn

AWS = "/latest/meta-data"
AZURE = "/metadata/scheduledevents?api-version=2020-07-01"
SOON = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=3600)
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
