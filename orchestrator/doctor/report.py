"""Findings of the checks, and what they add up to. Plain data: neither torch nor Ray."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "warning", "failed"]

_CREDENTIALS = re.compile(r"(?<=://)[^/\s@]+@")
_STATUSES: tuple[Status, ...] = ("ok", "warning", "failed")


@dataclass(frozen=True)
class Finding:
    """What one check found on one node.

    Attributes:
        check: such as "storage".
        node: name of the node; empty for the cluster as a whole.
        status: "warning" if a run works, but slowly or at a risk; "failed" if it will not work.
        found: what was found, without secrets.
        advice: what to do; empty if nothing.
    """

    check: str
    node: str
    status: Status
    found: str
    advice: str = ""


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 1 if a check failed, else 0."""
    return int(any(each.status == "failed" for each in findings))


def document(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the findings as the fields of a JSON document."""
    return {"status": worst(findings), "findings": [asdict(each) for each in findings]}


def worst(findings: Iterable[Finding]) -> Status:
    """Return the most severe status; "ok" without findings."""
    return max((each.status for each in findings), key=_STATUSES.index, default="ok")


def summary(findings: Sequence[Finding]) -> str:
    """Return one line, such as "12 ok, 1 warning, 0 failed"."""
    counts = {status: sum(each.status == status for each in findings) for status in _STATUSES}
    plural = "s"[: counts["warning"] != 1]
    return f"{counts['ok']} ok, {counts['warning']} warning{plural}, {counts['failed']} failed"


def redact(text: str) -> str:
    """Return a text on one line, without the user names and passwords of URLs."""
    return _CREDENTIALS.sub("***@", " ".join(text.split()))
