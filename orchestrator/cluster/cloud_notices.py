"""Notices of clouds that they will take this machine away, from their metadata services. Imports neither Ray nor torch.

Amazon EC2: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html and
rebalance-recommendations.html (IMDSv2). Google Compute Engine:
https://cloud.google.com/compute/docs/instances/create-use-preemptible. Azure:
https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Literal, get_args

from headway.trainer.errors import ConfigError

Cloud = Literal["aws", "gcp", "azure"]
CLOUDS: tuple[Cloud, ...] = get_args(Cloud)
METADATA_URL = "http://169.254.169.254"
"""The address of the metadata service, which is the same in all three clouds."""

_TIMEOUT_S = 2.0
_TOKEN_S = 6 * 3600
# Compute Engine gives no time, but stops a machine 30 s after the notice.
_GCP_NOTICE_S = 30.0
_AZURE_EVENTS = ("Preempt", "Terminate", "Reboot", "Redeploy")
# The service is on this machine's host: a proxy does not reach it.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, kw_only=True)
class Notice:
    """A notice that this machine will be taken away.

    Attributes:
        reason: what the cloud says.
        left_s: seconds until then; None if unknown.
    """

    reason: str
    left_s: float | None


class MetadataService:
    """The metadata service of the machine that this process runs on.

    Args:
        cloud: the cloud.
        url: address of the service.
        counts_rebalance: count a rebalance recommendation of EC2 as a notice without a time.
    """

    def __init__(self, cloud: Cloud, url: str = METADATA_URL, *, counts_rebalance: bool = False) -> None:
        self.cloud, self._url, self._counts_rebalance = cloud, url.rstrip("/"), counts_rebalance
        self._token, self._token_since_s = "", 0.0
        self._azure_name: str | None = None

    def notice(self) -> Notice | None:
        """Return the notice for this machine, if there is one.

        Raises:
            OSError: the service does not answer.
            ValueError: its answer is not what the cloud documents.
        """
        try:
            if self.cloud == "aws":
                return self._aws_notice()
            return self._gcp_notice() if self.cloud == "gcp" else self._azure_notice()
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{self.cloud} answers in an unknown form ({type(error).__name__}: {error})") from error

    def answers(self) -> bool:
        """Return whether the service is that of the cloud."""
        try:
            if self.cloud == "aws":
                return bool(self._aws_token())
            if self.cloud == "gcp":
                return self._get("/computeMetadata/v1/instance/id", {"Metadata-Flavor": "Google"}) is not None
            return bool(self._name_in_azure())
        except (OSError, ValueError):
            return False

    def _aws_notice(self) -> Notice | None:
        action = self._aws_get("spot/instance-action")
        if action is not None:
            planned = json.loads(action)
            at = datetime.fromisoformat(planned["time"])
            return Notice(reason=f"EC2 spot interruption ({planned['action']})", left_s=_seconds_until(at))
        if self._counts_rebalance and self._aws_get("events/recommendations/rebalance") is not None:
            return Notice(reason="EC2 rebalance recommendation", left_s=None)
        return None

    def _aws_get(self, path: str) -> str | None:
        try:
            return self._get(f"/latest/meta-data/{path}", {"X-aws-ec2-metadata-token": self._aws_token()})
        except urllib.error.HTTPError as error:
            if error.code == 401:
                self._token = ""  # the next call gets another one
            raise

    def _aws_token(self) -> str:
        if not self._token or time.monotonic() - self._token_since_s > _TOKEN_S / 2:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
            self._token = self._get("/latest/api/token", headers, method="PUT") or ""
            self._token_since_s = time.monotonic()
        return self._token

    def _gcp_notice(self) -> Notice | None:
        preempted = self._get("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
        if (preempted or "").strip().upper() != "TRUE":
            return None
        return Notice(reason="Compute Engine preemption", left_s=_GCP_NOTICE_S)

    def _azure_notice(self) -> Notice | None:
        text = self._get("/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"})
        for event in json.loads(text or "{}").get("Events", ()):
            if event["EventType"] in _AZURE_EVENTS and self._name_in_azure() in event["Resources"]:
                # No time once the event has started.
                at = parsedate_to_datetime(event["NotBefore"]) if event.get("NotBefore") else None
                left_s = 0.0 if at is None else _seconds_until(at)
                return Notice(reason=f"Azure scheduled event ({event['EventType']})", left_s=left_s)
        return None

    def _name_in_azure(self) -> str | None:
        if self._azure_name is None:
            path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            self._azure_name = self._get(path, {"Metadata": "true"})
        return self._azure_name

    def _get(self, path: str, headers: Mapping[str, str], *, method: str = "GET") -> str | None:
        """Return the answer to a request; None if there is no such thing."""
        request = urllib.request.Request(f"{self._url}{path}", headers=dict(headers), method=method)
        try:
            with _OPENER.open(request, timeout=_TIMEOUT_S) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise
        except http.client.HTTPException as error:
            # Not an OSError: an answer that is no HTTP, or is cut off.
            raise ConnectionError(f"{type(error).__name__}: {error}") from error


def find_service(cloud: str, url: str = METADATA_URL, *, counts_rebalance: bool = False) -> MetadataService | None:
    """Return the metadata service of a cloud; with "auto" the first that answers, None if none does.

    Raises:
        ConfigError: there is no such cloud.
    """
    if cloud not in (*CLOUDS, "auto"):
        raise ConfigError(f"--cloud must be auto, none, {', '.join(CLOUDS)}; got {cloud!r}")
    services = [MetadataService(each, url, counts_rebalance=counts_rebalance) for each in CLOUDS]
    if cloud != "auto":
        return next(each for each in services if each.cloud == cloud)
    return next((each for each in services if each.answers()), None)


def _seconds_until(at: datetime) -> float:
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return max(0.0, (at - datetime.now(UTC)).total_seconds())
