"""What `Scaling` passes on to Ray Train: placement, environment of the workers, and GPUs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray.train.torch
import torch

from headway.orchestrator import Scaling
from headway.orchestrator.cluster.connect import unused_gpus, with_gpus
from headway.orchestrator.runs.open import open_run
from headway.orchestrator.runs.resume import ResumeOptions
from headway.orchestrator.train.worker_group import _MOST_RAY_RETRIES, passing_function_by_value, run_worker_group
from headway.trainer import ConfigError, ParallelConfig
from tests.orchestrator.runs.test_run import experiment
from tests.trainer.distributed.test_backends import install_backend


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the arguments of Ray's `TorchTrainer`, which trains nothing here."""
    arguments: dict[str, Any] = {}

    class Stub:
        def __init__(self, _: Any, **settings: Any) -> None:
            arguments.update(settings)

        def fit(self) -> Any:
            return SimpleNamespace(return_value={"status": "completed", "reason": ""})

    monkeypatch.setattr(ray.train.torch, "TorchTrainer", Stub)
    return arguments


def run_with(scaling: Scaling, storage: Path) -> None:
    ours = replace(experiment(storage), scaling=scaling)
    run_worker_group(
        ours, open_run(ours).run, resume_options=ResumeOptions(), wait_timeout_s=1, verbose=False, spares=False
    )


def test_what_rays_scaling_config_takes_reaches_it(tmp_path: Path, given: dict[str, Any]) -> None:
    scaling = Scaling(
        workers=2, gpus_per_worker=1, accelerator_type="H100", placement_strategy="STRICT_PACK",
        label_selector={"ray.io/market-type": "!spot"}, env={"NCCL_DEBUG": "INFO"}, runtime_env={"pip": ["einops"]},
    )  # fmt: skip
    run_with(scaling, tmp_path)
    ours, run = given["scaling_config"], given["run_config"]
    assert (ours.num_workers, ours.use_gpu, ours.accelerator_type) == (2, True, "H100")
    assert (ours.placement_strategy, ours.label_selector) == ("STRICT_PACK", {"ray.io/market-type": "!spot"})
    assert ours.resources_per_worker == {"CPU": 1, "GPU": 1, "accelerator_type:H100": 0.001}
    assert run.worker_runtime_env == {"pip": ["einops"], "env_vars": {"NCCL_DEBUG": "INFO"}}
    assert given["torch_config"].backend == "nccl"


def test_ray_train_itself_ends_retries_after_a_finite_number(tmp_path: Path, given: dict[str, Any]) -> None:
    """Should Ray suppress the exceptions of `RetryPolicy`, a hopeless run ends all the same."""
    run_with(Scaling(), tmp_path)
    failures = given["run_config"].failure_config
    assert failures.max_failures == _MOST_RAY_RETRIES == 20
    assert 0 < failures.controller_failure_limit < 100


def test_workers_get_the_training_function_without_the_object_store(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A copy in the object store may be on the machine that was lost, and a worker would wait for it."""
    # Without a Ray: what is put is its own reference.
    monkeypatch.setattr(ray, "put", lambda value: [value])
    monkeypatch.setattr(ray, "get", lambda reference: reference[0])
    given: dict[str, Any] = {}

    def start(_: Any, **settings: Any) -> Any:
        given.update(settings)
        return SimpleNamespace(error=None)

    monkeypatch.setattr(ray.train.torch.TorchTrainer, "_initialize_and_run_controller", start)
    run_config = ray.train.RunConfig(storage_path=str(tmp_path))
    passing_function_by_value(ray.train.torch.TorchTrainer)(lambda: "the result", run_config=run_config).fit()
    monkeypatch.setattr(ray, "get", lambda _: pytest.fail("the function is taken from the object store"))
    assert ray.cloudpickle.loads(ray.cloudpickle.dumps(given["train_fn_ref"])).get()() == "the result"


def test_gpus_are_used_by_default_where_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert with_gpus(Scaling(workers=2)).gpus_per_worker == 1
    assert with_gpus(Scaling(workers=3)).gpus_per_worker == 0
    assert with_gpus(Scaling(workers=2, evaluation_worker={"GPU": 1})).gpus_per_worker == 0
    assert with_gpus(Scaling(workers=2, gpus_per_worker=0)).gpus_per_worker == 0
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 4.0})
    assert with_gpus(Scaling(workers=(4, 8))).gpus_per_worker == 1
    assert unused_gpus(Scaling(workers=4, gpus_per_worker=1)) is None
    told = unused_gpus(Scaling(workers=8, gpus_per_worker=0))
    assert told == (
        "the workers train on CPUs, and 4 GPUs of the cluster are unused: scaling.gpus_per_worker=1 gives one to each "
        "of 8 workers, and a fraction shares them"
    )
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0})
    assert unused_gpus(Scaling()) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"placement_strategy": "CLOSE"}, "placement_strategy must be PACK, SPREAD, STRICT_PACK, STRICT_SPREAD"),
        ({"env": {"NCCL_IB_DISABLE": 1}}, r"env\['NCCL_IB_DISABLE'\] must be a string, got 1: write it in quotes"),
        ({"runtime_env": {"env_vars": {}}}, r"runtime_env\['env_vars'\] is not allowed: use env"),
        ({"gpus_per_worker": -1}, "gpus_per_worker must be >= 0, got -1"),
    ],
)
def test_invalid_options_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Scaling(**settings)


def test_backends_are_checked_against_the_devices_of_the_workers(tmp_path: Path) -> None:
    def with_backend(backend: str, **scaling: Any) -> None:
        ours = experiment(tmp_path)
        parallel = ParallelConfig(backend=backend)
        replace(ours, config=replace(ours.config, parallel=parallel), scaling=Scaling(**scaling))

    for backend, scaling, message in [
        ("ncll", {}, "parallel.backend='ncll' must name backends that this torch.distributed has"),
        ("nccl", {"gpus_per_worker": 0}, "'nccl' is for cuda, and the workers have CPUs only: set"),
        ("cpu:gloo", {"gpus_per_worker": 1}, "'cpu:gloo' is for CPUs, and each worker has 1 GPU: leave it out"),
    ]:
        with pytest.raises(ConfigError, match=message):
            with_backend(backend, **scaling)
    # GPUs that are counted when the run starts, Intel's, and packages that Ray Train loads.
    with_backend("nccl")
    with_backend("xccl", gpus_per_worker=1)
    with_backend("hccl", resources_per_worker={"HPU": 1})
    with_backend("cpu:gloo,hpu:hccl", resources_per_worker={"HPU": 1})


_PROGRAM = """
import os
import torch.distributed as dist
from headway.orchestrator import Experiment, Scaling, fit
from headway.trainer import ParallelConfig
from tests.tiny import TinyConfig, TinyTrainer

class NamesItsBackend(TinyTrainer):
    def on_fit_start(self):
        self.print(f"{dist.get_backend()} on {self.device}")

if __name__ == "__main__":
    config = TinyConfig(max_steps=2, parallel=ParallelConfig(backend="plugin"))
    scaling = Scaling(workers=2, cpus_per_worker=0.5)
    fit(Experiment(name="run", trainer=NamesItsBackend, config=config, scaling=scaling, storage="runs"))
"""


@pytest.mark.extended
@pytest.mark.ray
def test_workers_communicate_by_a_backend_of_an_installed_package(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_PROGRAM)
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=install_backend(tmp_path), capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "plugin on cpu" in done.stdout
