"""Settings that exact mode makes in its process."""

from __future__ import annotations

import os

import pytest

from tests.tiny import TinyConfig, TinyTrainer


def test_cublas_is_set_before_a_product_on_a_gpu_can_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    TinyTrainer(TinyConfig())
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    TinyTrainer(TinyConfig(exact=True))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
