"""What `Scaling` passes on to Ray Train: placement, environment of the workers, and GPUs."""

from __future__ import annotations

import os
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
from ray import cloudpickle

from headway.orchestrator import Scaling
from headway.orchestrator.cluster.connect import unused_gpus, with_gpus
from headway.orchestrator.runs.open import open_run
from headway.orchestrator.runs.resume import ResumeOptions
from headway.orchestrator.train.loopback_store import LoopbackTorchConfig
from headway.orchestrator.train.worker_group import _MOST_RAY_RETRIES, passing_function_by_value, run_worker_group
from headway.trainer import ConfigError, ParallelConfig
from tests.orchestrator.runs.test_run import experiment
from tests.trainer.distributed.test_backends import install_backend


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the arguments of Ray's `TorchTrainer`, which trains nothing here."""
    arguments: dict[str, Any] = {}

    class Stub:
        def __init__(self, function: Any, **settings: Any) -> None:
            arguments.update(settings, function=function)

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


def test_a_worker_may_reserve_tpus(tmp_path: Path, given: dict[str, Any]) -> None:
    """Ray Train refuses them without `use_tpu`, and several workers without a topology."""
    run_with(Scaling(resources_per_worker={"TPU": 4}), tmp_path)
    assert given["scaling_config"].use_tpu
    assert given["scaling_config"].num_tpus_per_worker == 4
    with pytest.raises(ConfigError, match="TPU'. needs workers=1, got 2 workers: .*use TorchTrainer.train_loop"):
        Scaling(workers=2, resources_per_worker={"TPU": 4})


def test_ray_train_itself_ends_retries_after_a_finite_number(tmp_path: Path, given: dict[str, Any]) -> None:
    """Should Ray suppress the exceptions of `RetryPolicy`, a hopeless run ends all the same."""
    run_with(Scaling(), tmp_path)
    failures = given["run_config"].failure_config
    assert failures.max_failures == _MOST_RAY_RETRIES == 20
    assert 0 < failures.controller_failure_limit < 100


def test_rays_controller_does_not_import_the_trainer(tmp_path: Path, given: dict[str, Any]) -> None:
    """It gets all of this before it starts the workers, which wait for its imports."""
    run_with(Scaling(workers=2), tmp_path)
    contents = (given["function"], given["train_loop_config"], given["run_config"].callbacks)
    (tmp_path / "contents").write_bytes(cloudpickle.dumps(contents))
    script = (
        "import sys, ray.train, ray.cloudpickle\n"
        "ray.cloudpickle.loads(open(sys.argv[1], 'rb').read())\n"
        "assert 'headway.orchestrator.train.failures.retry_policy' in sys.modules\n"
        "assert not {'torch', 'headway.trainer.trainer'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "contents")], check=True)


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


@pytest.mark.parametrize("arguments", [{}, {"train_fn_ref": object()}, {"function": "another name"}])
def test_a_ray_that_passes_the_function_otherwise_trains(arguments: dict[str, Any]) -> None:
    class Changed:
        def _initialize_and_run_controller(self, *others: Any, **settings: Any) -> Any:
            return others, settings

    changed: Any = passing_function_by_value(Changed)()
    assert changed._initialize_and_run_controller("context", **arguments) == (("context",), arguments)


def test_workers_whose_group_has_other_methods_start_as_ray_starts_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = LoopbackTorchConfig(backend="gloo").backend_cls
    started: list[Any] = []
    monkeypatch.setattr(backend.__mro__[1], "on_start", lambda _, *given: started.append(given))
    backend().on_start("a group", "a config")
    assert started == [("a group", "a config")]
    assert "the store of the process group listens on all network interfaces" in caplog.text


def test_gpus_are_used_by_default_where_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert with_gpus(Scaling(workers=2)).gpus_per_worker == 1
    assert with_gpus(Scaling(workers=3)).gpus_per_worker == 0
    assert with_gpus(Scaling(workers=2, evaluation_worker={"GPU": 1})).gpus_per_worker == 0
    assert with_gpus(Scaling(workers=2, gpus_per_worker=0)).gpus_per_worker == 0
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 8.0, "GPU": 4.0}}])
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
        ({"runtime_env": {"worker_process_setup_hook": "a.b"}}, "Ray runs it only for a whole job, .* on_fit_start"),
        ({"runtime_env": {"excludes": ["data"]}}, r"runtime_env\['excludes'\] is not allowed: .* use .rayignore"),
        ({"runtime_env": {"config": {"eager_install": False}}}, "has no effect on workers: leave it out"),
        ({"runtime_env": {"working_dir": "."}}, r"working_dir'\] must be a URI such as .*, got '\.'"),
        ({"runtime_env": {"py_modules": ["s3://b/c.zip", "mine"]}}, "py_modules'] must be a URI .* got 'mine'"),
        ({"runtime_env": {"pips": ["einops"]}}, "runtime_env.'pips'. is unknown to Ray, which would ignore it: use co"),
        ({"runtime_env": {"pip": ["einops"], "conda": "base"}}, "runtime_env is invalid: .* at the same time"),
        ({"gpus_per_worker": -1}, "gpus_per_worker must be >= 0, got -1"),
        ({"cpus_per_worker": "2"}, "cpus_per_worker must be a number, got '2'"),
        ({"gpus_per_worker": "1"}, "gpus_per_worker must be a number, got '1'"),
        ({"resources_per_worker": {"TPU": "2"}}, r"resources_per_worker\['TPU'\] must be a number, got '2'"),
        ({"resources_per_worker": ["TPU"]}, r"resources_per_worker must be a dict, got \['TPU'\]"),
        ({"label_selector": [{"zone": "a"}]}, "label_selector must be a dict, which is for all workers, got"),
        ({"env": ["A=1"]}, r"env must be a dict, got \['A=1'\]"),
        ({"runtime_env": "env.yaml"}, "runtime_env must be a dict, got 'env.yaml'"),
        ({"evaluation_worker": ["CPU"]}, r"evaluation_worker must be a dict, got \['CPU'\]"),
        ({"evaluation_worker": {"CPU": "1"}}, r"evaluation_worker\['CPU'\] must be a number, got '1'"),
    ],
)
def test_invalid_options_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Scaling(**settings)


@pytest.mark.ray
def test_ray_ignores_for_actors_what_is_refused_as_an_option_of_workers(ray_session: None) -> None:
    """If this fails, Ray may run the hook for workers, too, and `Scaling` may accept it."""

    class Worker:
        def environment(self) -> dict[str, str]:
            return dict(os.environ)

    worker: Any = ray.remote(Worker)
    hook = {"worker_process_setup_hook": "tests.orchestrator.train.test_worker_options.set_a_variable"}
    actor = worker.options(num_cpus=0, runtime_env=hook).remote()
    assert "HEADWAY_TEST_OF_A_HOOK" not in ray.get(actor.environment.remote(), timeout=120)
    ray.kill(actor)


def set_a_variable() -> None:
    os.environ["HEADWAY_TEST_OF_A_HOOK"] = "1"


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
