"""`Scaling.label_selector`: which nodes count, and where workers and trials run."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import tune
from ray.exceptions import RayActorError
from ray.train import ControllerError
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError

from headway.orchestrator import Experiment, Run, Scaling, fit, trainable
from headway.orchestrator.cluster import connect
from headway.orchestrator.cluster.connect import check_resources, describe_wait, target_workers_now, with_gpus
from headway.orchestrator.cluster.nodes import has_label, usable_nodes
from headway.orchestrator.runs.open import open_run
from headway.orchestrator.storage.events import EventWriter
from headway.orchestrator.storage.folder import Folder
from headway.orchestrator.sweeps.tune.trial import trial_resources
from headway.orchestrator.train.elastic import RAY_LEARNS_S
from headway.orchestrator.train.failures import retry_policy
from headway.orchestrator.train.failures.budget import Failure
from headway.orchestrator.train.failures.retry_policy import Restart, RestartRequired, RetryPolicy
from headway.orchestrator.train.worker_group import _restart_after, workers_to_request
from headway.trainer import CheckpointConfig, ConfigError
from tests.machines import machines
from tests.tiny import TinyConfig, TinyTrainer


@pytest.mark.parametrize(
    ("wanted", "nodes"),
    [("a", ["a"]), ("!a", ["b", None]), ("in(a, b)", ["a", "b"]), ("in(b)", ["b"]), ("!in(a,b)", [None])],
)
def test_conditions_on_labels(wanted: str, nodes: list[str | None]) -> None:
    there = ["a", "b", None]
    assert [zone for zone in there if has_label({"zone": zone} if zone else {}, "zone", wanted)] == nodes


def node(zone: str, **resources: float) -> dict[str, Any]:
    return {"NodeID": f"node-{zone}", "Alive": True, "Labels": {"zone": zone}, "Resources": resources}


@pytest.fixture
def two_zones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster with two CPUs in zone a, and eight CPUs and two GPUs in zone b."""
    nodes = [node("a", CPU=2.0), node("b", CPU=8.0, GPU=2.0)]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 10.0, "GPU": 2.0})
    free = {each["NodeID"]: each["Resources"] for each in nodes}
    monkeypatch.setattr("ray._private.state.available_resources_per_node", lambda: free)
    monkeypatch.setattr(connect, "placed_groups", set)


@pytest.mark.usefixtures("two_zones")
def test_only_nodes_with_the_labels_count() -> None:
    in_a = Scaling(workers=3, gpus_per_worker=0, label_selector={"zone": "a"})
    with pytest.raises(ConfigError, match="has 2 of 3 places of 1 CPU on one machine with the labels zone=a that 3 wo"):
        check_resources(in_a)
    assert describe_wait(in_a, set()) == (
        "waiting for 3 workers: 2 fit (2 CPU free of 2, on machines with the labels zone=a)"
    )
    check_resources(replace(in_a, label_selector={"zone": "b"}))
    assert with_gpus(Scaling(workers=2, label_selector={"zone": "a"})).gpus_per_worker == 0
    assert with_gpus(Scaling(workers=2)).gpus_per_worker == 1


@pytest.mark.usefixtures("two_zones")
def test_the_driver_sizes_an_elastic_group_with_labels(tmp_path: Path) -> None:
    """Ray Train would count the nodes without the labels, and wait for ever for workers on them."""
    scaling = Scaling(workers=(1, 8), label_selector={"zone": "a"})
    assert workers_to_request(frozenset(), scaling) == (1, 2)
    assert target_workers_now(scaling, workers=1) == 2
    policy = RetryPolicy(str(tmp_path), start="", max_failures=1, max_errors=1, scaling=scaling)
    with pytest.raises(RestartRequired) as raised:
        policy.after_exception(None, {0: RayActorError()})
    assert raised.value.restart.delay_s >= 22


@pytest.mark.usefixtures("two_zones")
@pytest.mark.parametrize("avoids", [False, True], ids=["labels", "avoided node"])
def test_a_lost_machine_is_not_counted_in_the_next_group(
    avoids: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group waits until Ray has noticed the loss, and is sized again if Ray had not."""
    if avoids:
        scaling, avoided = Scaling(workers=(1, 8), gpus_per_worker=0), frozenset({"node-b"})
    else:
        scaling, avoided = Scaling(workers=(1, 8), label_selector={"zone": "a"}), frozenset()
    lost = Failure(attempt=1, rank=1, lost_node=True, lost_ranks=(1,), node_id="node-c")
    folder = Folder(str(tmp_path))
    folder.prepare()
    EventWriter(folder, "worker", start="s").add("attempt_started", attempt=1, world_size=2, workers=[])
    monkeypatch.setattr(retry_policy, "find_cause", lambda *_: lost)
    monkeypatch.setattr(retry_policy, "nodes_to_avoid", lambda _: set(avoided))
    policy = RetryPolicy(str(tmp_path), start="s", max_failures=1, max_errors=1, scaling=scaling, avoided=avoided)
    with pytest.raises(RestartRequired) as raised:
        policy.after_exception(None, {1: RayActorError()})
    assert raised.value.restart == Restart(delay_s=RAY_LEARNS_S, avoid=avoided)

    run = open_run(Experiment(name="run", trainer=TinyTrainer, config=TinyConfig(), storage=str(tmp_path))).run
    late = ControllerError(WorkerGroupStartupTimeoutError(2))
    assert _restart_after(late, run, avoided, scaling) == Restart(avoid=avoided)
    assert _restart_after(late, run, frozenset(), Scaling(workers=(1, 8))) is None


def test_a_trial_has_the_labels_and_the_environment_of_its_worker() -> None:
    labels = {"zone": "a"}
    bundles = trial_resources(Scaling(label_selector=labels), {})
    assert (bundles.bundles, bundles._kwargs) == ([{"CPU": 1}], {"bundle_label_selector": [labels]})
    # Ray Tune gives its processes no environment: Ray Train starts a worker that has it.
    for scaling in (Scaling(env={"A": "1"}), Scaling(runtime_env={"pip": ["einops"]})):
        assert trial_resources(scaling, {}).bundles == [{"memory": 1}]


class NamesItsNode(TinyTrainer):
    """Writes down where it trains, and a variable of its environment."""

    def on_fit_start(self) -> None:
        where = {"node": ray.get_runtime_context().get_node_id(), "variable": os.environ.get("HEADWAY_TEST")}
        Path(str(self.run_dir), f"node-{self.world.rank}.json").write_text(json.dumps(where))


@pytest.mark.extended
@pytest.mark.ray
def test_workers_and_trials_run_on_nodes_with_the_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def experiment(name: str, **scaling: Any) -> Experiment:
        checkpoint = CheckpointConfig(every=None)
        config = TinyConfig(max_steps=4, global_batch_size=16, checkpoint=checkpoint)
        return Experiment(
            name=name, trainer=NamesItsNode, config=config, scaling=Scaling(**scaling), storage=str(tmp_path)
        )

    def where(run_dir: str) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(Path(run_dir).glob("node-*.json"))]

    assert not ray.is_initialized(), "needs its own Ray"
    with machines(monkeypatch, 0) as cluster:
        for zone in ("a", "b", "b"):
            cluster.add_node(num_cpus=1, labels={"zone": zone})
        ray.init(cluster.address, log_to_driver=False, configure_logging=False)
        try:
            nodes = {each["NodeID"]: each["Labels"].get("zone") for each in ray.nodes()}
            # The rules are Ray's.
            there = ray.remote(num_cpus=0)(lambda: ray.get_runtime_context().get_node_id())
            for wanted in ("a", "!in(a, b)"):
                (only,) = usable_nodes(Scaling(label_selector={"zone": wanted}))
                found = ray.get(there.options(label_selector={"zone": wanted}).remote(), timeout=120)
                assert found == only["NodeID"]

            elastic = experiment("elastic", workers=(1, 3), label_selector={"zone": "!a"})
            assert fit(elastic).status == "completed"
            assert [nodes[each["node"]] for each in where(elastic.run_dir)] == ["b", "b"]

            for name, scaling in {"labels": {}, "variables": {"env": {"HEADWAY_TEST": "1"}}}.items():
                trial = experiment(name, label_selector={"zone": "a"}, **scaling)
                results = tune.Tuner(
                    trainable(trial, metric="validation/loss"),
                    run_config=tune.RunConfig(name=name, storage_path=str(tmp_path / "ray"), verbose=0),
                ).fit()
                assert results.num_errors == 0
                (folder,) = Path(trial.run_dir).iterdir()
                assert Run(str(folder)).status == "completed"
                (found,) = where(str(folder))
                assert nodes[found["node"]] == "a"
                assert found["variable"] == scaling.get("env", {}).get("HEADWAY_TEST")
        finally:
            ray.shutdown()
