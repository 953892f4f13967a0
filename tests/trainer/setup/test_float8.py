"""Float8 is refused on unsupported devices, before anything is built. Its results are tested only with a GPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

from headway.trainer import ConfigError, World
from headway.trainer.setup.float8 import check_float8, convert_to_float8, fits_float8
from tests.tiny import TinyConfig, TinyTrainer

CAN = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def test_a_cpu_refuses_float8_before_anything_is_built() -> None:
    built: list[str] = []

    class Watches(TinyTrainer):
        def configure_models(self) -> None:
            built.append("too late")

    with pytest.raises(ConfigError, match="float8 needs an NVIDIA GPU, but the model trains on the cpu"):
        Watches(TinyConfig(max_steps=1, float8=True), world=World.single("cpu")).fit()
    assert built == []


def test_only_trained_linear_layers_of_fitting_sizes_are_converted() -> None:
    assert fits_float8(nn.Linear(32, 16))
    assert not fits_float8(nn.Linear(32, 3))
    assert not fits_float8(nn.Linear(6, 16))
    assert not fits_float8(nn.Linear(32, 16).requires_grad_(False))
    assert not fits_float8(nn.Conv1d(16, 16, 1))


@pytest.mark.gpu
@pytest.mark.skipif(not CAN, reason="needs a GPU with float8")
def test_a_gpu_trains_linear_layers_in_float8() -> None:
    device = torch.device("cuda")
    if importlib.util.find_spec("torchao") is None:
        with pytest.raises(ConfigError, match="float8 needs the package torchao"):
            check_float8(device)
        return
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to(device)
    x = torch.randn(32, 64, device=device)
    with torch.autocast("cuda", torch.bfloat16):
        before = plain(x)
    convert_to_float8({"model": plain})
    with torch.autocast("cuda", torch.bfloat16):
        after = plain(x)
    after.float().square().mean().backward()
    torch.testing.assert_close(after, before, atol=0.1, rtol=0.1)
    assert not torch.equal(after, before)
