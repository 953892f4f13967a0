"""Temporary environment variables."""

from __future__ import annotations

import os

import pytest

from headway.orchestrator.cluster.ray_env import temporary_env


def test_what_was_there_is_there_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_THERE", "before")
    monkeypatch.delenv("HEADWAY_NEW", raising=False)

    def fail() -> None:
        with temporary_env({"HEADWAY_THERE": "now", "HEADWAY_NEW": "now"}):
            assert os.environ["HEADWAY_THERE"] == os.environ["HEADWAY_NEW"] == "now"
            raise KeyError("of the user")

    with pytest.raises(KeyError, match="of the user"):
        fail()
    assert os.environ["HEADWAY_THERE"] == "before"
    assert "HEADWAY_NEW" not in os.environ


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_THERE", "the user's")
    monkeypatch.delenv("HEADWAY_NEW", raising=False)
    with temporary_env({"HEADWAY_THERE": "ours", "HEADWAY_NEW": "ours"}, unless_set=True):
        assert (os.environ["HEADWAY_THERE"], os.environ["HEADWAY_NEW"]) == ("the user's", "ours")
    assert os.environ["HEADWAY_THERE"] == "the user's"
    assert "HEADWAY_NEW" not in os.environ
