"""Settings that exact mode makes in its process."""

from __future__ import annotations

import os

import pytest
import torch

from headway.trainer.exact.determinism import hardware_fingerprint
from tests.tiny import TinyConfig, TinyTrainer


def test_cublas_is_set_before_a_product_on_a_gpu_can_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    TinyTrainer(TinyConfig())
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    TinyTrainer(TinyConfig(exact=True))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_what_chooses_the_kernels_of_a_gpu_is_part_of_its_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: its name and capability are made up."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    device, matmul = torch.device("cuda"), torch.backends.cuda.matmul
    before = hardware_fingerprint(device)
    assert (before["computes on"], before["compute capability"]) == ("a GPU", "9.0")
    assert {"cuDNN", "CUDA", "driver", "CUBLAS_WORKSPACE_CONFIG"} < set(before)
    matmul.allow_tf32 = not matmul.allow_tf32
    try:
        after = hardware_fingerprint(device)
    finally:
        matmul.allow_tf32 = not matmul.allow_tf32
    assert {name for name in before if before[name] != after[name]} == {"TF32 in matrix products"}
    assert "TF32 in matrix products" not in hardware_fingerprint(torch.device("cpu"))
