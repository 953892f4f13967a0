"""The error when a local Ray does not start."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from headway.orchestrator import Scaling
from headway.orchestrator.cluster.connect import ray_connection
from headway.trainer.errors import HeadwayError


def test_a_machine_too_busy_for_ray_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: Any) -> None:
        raise Exception("The current node timed out during startup. This could happen because ...")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(HeadwayError, match=r"not started .* within 30 s"), ray_connection(Scaling(), verbose=False):
        raise AssertionError("there is no Ray")
