"""Backends of `torch.distributed` by name, also of a package that torch loads, and the device that ranks train on."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from headway.trainer import ConfigError, ParallelConfig, World
from headway.trainer.distributed import world
from tests.tiny import TinyConfig, TinyTrainer

_PLUGIN = """
import torch.distributed as dist

def create(store, rank, size, timeout):
    print("the backend of the package is used", flush=True)
    return dist.ProcessGroupGloo(store, rank, size, timeout)

def register():
    dist.Backend.register_backend("plugin", create, devices=["cpu"])
"""
_PROGRAM = """
import sys
import torch
import torch.distributed as dist
from headway.trainer import ParallelConfig
from tests.tiny import TinyConfig, TinyTrainer

config = TinyConfig(max_steps=3, global_batch_size=16, parallel=ParallelConfig(backend="plugin"))
trainer = TinyTrainer(config, run_dir=sys.argv[1])
with trainer.world as world:
    assert dist.get_backend() == "plugin" and world.device.type == "cpu"
    trainer.fit()
    if world.is_main:
        torch.save(trainer.model.module.state_dict(), sys.argv[2])
"""


def install_backend(folder: Path) -> dict[str, str]:
    """Install a package with a backend in a folder; returns the environment of processes that find it."""
    (folder / "a_plugin.py").write_text(_PLUGIN)
    info = folder / "a_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: a_plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\na_plugin = a_plugin:register\n")
    root = Path(__file__).parents[3]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(root), os.environ.get("PYTHONPATH", "")])}


@pytest.mark.extended
def test_a_backend_of_an_installed_package_trains_the_same_weights(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_PROGRAM)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **install_backend(tmp_path), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "run"), str(tmp_path / "weights.pt")],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path,
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in ranks:
        printed, _ = process.communicate(timeout=300)
        assert process.returncode == 0, printed
        assert "the backend of the package is used" in printed
    alone = TinyTrainer(
        TinyConfig(max_steps=3, global_batch_size=16), world=World.single("cpu"), run_dir=tmp_path / "alone"
    )
    alone.fit()
    torch.testing.assert_close(torch.load(tmp_path / "weights.pt"), alone.model.state_dict(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("backend", ["", "NCCL", "gloo,nccl", "cpu:gloo,nccl", "cpu:", 3])
def test_what_is_no_name_of_a_backend_is_refused(backend: str) -> None:
    with pytest.raises(ConfigError, match=r'backend must be a name such as "nccl", .* got '):
        ParallelConfig(backend=backend)


def test_a_backend_that_torch_does_not_know_is_named_before_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    config = TinyConfig(max_steps=1, parallel=ParallelConfig(backend="cpu:gloo,cuda:ncll"))
    with pytest.raises(ConfigError, match=r"\(.*gloo.*nccl.*\), got 'ncll': correct it, or install and import"):
        TinyTrainer(config).fit()
    # Torch lists these; the first two where it was built without them, and the last one moves no data.
    unusable = [
        "fake",
        *(["mpi"] if not dist.is_mpi_available() else []),
        *(["ucc"] if not dist.is_ucc_available() else []),
    ]
    for name in unusable:
        with pytest.raises(ConfigError, match=f"must name backends that this torch.distributed has .*, got '{name}'"):
            World.from_environment(backend=name)
    if torch.cuda.is_available():
        return
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="parallel.backend='nccl' is for cuda, but torch finds no such device here"):
        World.from_environment(backend="nccl")


def test_ranks_train_on_the_accelerator_that_the_backend_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the device: no machine of the tests has one."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    device = world._device(None, 3, world.device_types("xccl"))
    assert (str(device), chosen) == ("xpu:1", [1])
    assert str(world._device(None, 0, world.device_types("cpu:gloo,xpu:xccl"))) == "xpu:0"
    # As without a name: nothing that has not been asked for.
    assert str(world._device(None, 0, world.device_types(None))) == "cpu"
    assert str(world._device(None, 0, world.device_types("gloo"))) == "cpu"


def test_offloaded_gradients_get_gloo_beside_the_backend() -> None:
    assert world.backend_for("cuda") == "nccl"
    assert world.backend_for("cpu") == "gloo"
    assert world.backend_for("cuda", with_cpus=True) == "cpu:gloo,cuda:nccl"
    assert world.backend_for("cpu", with_cpus=True, backend="xccl") == "cpu:gloo,xpu:xccl"
    assert world.backend_for("cuda", with_cpus=True, backend="gloo") == "gloo"
    assert world.backend_for("cuda", with_cpus=True, backend="cpu:gloo,cuda:nccl") == "cpu:gloo,cuda:nccl"
