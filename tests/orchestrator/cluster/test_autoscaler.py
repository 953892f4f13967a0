"""Which group Ray's autoscalers start, by Ray's own code on the shipped files: what the docs promise rests on this."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.datasets.data_nodes import RESOURCE as DATA_NODE
from headway.orchestrator.cluster.launcher_file import load_cluster
from headway.orchestrator.cluster.starter_files import render, write_starter_files
from headway.trainer.loop.progress import Duration
from tests.autoscaler import group_chosen_by_v1, groups_asked_of_v2

ROOT = Path(__file__).parents[3]
SPOT, ON_DEMAND = "gpu-spot", "gpu-on-demand"
LAUNCHED = ["cluster.yaml", "aws.yaml", "gcp.yaml", "azure.yaml"]
KUBERNETES = ["rayjob.yaml", "raycluster.yaml"]
WORKER = {"CPU": 1.0, "GPU": 1.0}
# Version 1 prefers the last name; the second pair turns the order around.
NAMES = [(SPOT, ON_DEMAND), ("a-spot", "z-on-demand")]


def manifest(name: str) -> dict[str, Any]:
    plain: dict[str, Any] = yaml.safe_load(render(name))
    return plain["spec"].get("rayClusterSpec", plain["spec"])


def shipped(name: str, names: tuple[str, str] = NAMES[0]) -> dict[str, Any]:
    """Return what the autoscaler reads of a shipped file, with its two GPU groups renamed."""
    if name in KUBERNETES:
        from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

        config = _derive_autoscaling_config_from_ray_cr(
            {"metadata": {"name": "x", "namespace": "default"}, "spec": manifest(name)}
        )
    else:
        config = yaml.safe_load((ROOT / name).read_text() if name == "cluster.yaml" else render(name))
    new = dict(zip((SPOT, ON_DEMAND), names, strict=True))
    config["available_node_types"] = {
        new.get(group, group): plain for group, plain in copy.deepcopy(config["available_node_types"]).items()
    }
    return config


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("name", [*LAUNCHED, *KUBERNETES])
def test_version_2_starts_spot_first(name: str, names: tuple[str, str]) -> None:
    assert set(groups_asked_of_v2(shipped(name, names), WORKER, rounds=2)) == {names[0]}


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("name", KUBERNETES)
def test_on_kubernetes_version_2_takes_nodes_on_demand_when_spot_pods_stay_pending(
    name: str, names: tuple[str, str]
) -> None:
    asked = groups_asked_of_v2(shipped(name, names), WORKER, allocation_timeout_s=0)
    assert list(asked)[:2] == [names[0], names[1]]


@pytest.mark.parametrize("name", KUBERNETES)
def test_the_manifests_give_up_on_a_pending_pod_well_before_the_run_gives_up_waiting(name: str) -> None:
    """Ray's default is an hour."""
    options = manifest(name)["autoscalerOptions"]
    (limit,) = (each for each in options["env"] if each["name"] == "RAY_AUTOSCALER_RECONCILE_ALLOCATE_STATUS_TIMEOUT_S")
    entrypoint = yaml.safe_load(render("rayjob.yaml"))["spec"]["entrypoint"]
    (wait,) = (part.partition("=")[2] for part in entrypoint.split() if part.startswith("scaling.wait="))
    assert 2 * int(limit["value"]) <= Duration.parse(wait).amount


def test_ray_reads_that_limit_from_the_environment() -> None:
    from ray.autoscaler.v2.instance_manager import config

    assert '"RAY_AUTOSCALER_RECONCILE_ALLOCATE_STATUS_TIMEOUT_S", 60 * 60' in Path(config.__file__).read_text()


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("name", LAUNCHED)
def test_version_2_does_not_fall_back_where_the_cloud_refuses_a_launch(
    name: str, names: tuple[str, str], tmp_path: Path
) -> None:
    """A limitation of Ray 2.60: only nodes that time out lower a group's availability, not those that are refused.

    If this fails, Ray falls back: then change the note of `headway cluster check`, docs/clusters.md and the files.
    """
    config = shipped(name, names)
    assert set(groups_asked_of_v2(config, WORKER, refuses=[names[0]])) == {names[0]}
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(config))
    page = notes(str(file))
    assert f"while the cloud refuses to start nodes of {names[0]}" in page
    assert f"takes {names[1]} in place: the run waits" in page


@pytest.mark.parametrize("name", LAUNCHED)
def test_the_switch_that_the_check_advises_takes_nodes_on_demand(name: str) -> None:
    config = shipped(name)
    config["available_node_types"][SPOT]["max_workers"] = 0
    assert set(groups_asked_of_v2(config, WORKER, rounds=2)) == {ON_DEMAND}
    assert group_chosen_by_v1(config, WORKER, unavailable=[SPOT]) == ON_DEMAND


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("name", LAUNCHED)
def test_version_1_goes_by_the_alphabet_whatever_is_available(name: str, names: tuple[str, str]) -> None:
    config = shipped(name, names)
    for unavailable in ((), (names[0],), (names[1],)):
        assert group_chosen_by_v1(config, WORKER, unavailable=unavailable) == max(names)


@pytest.mark.parametrize("demand", [{"CPU": 1.0, DATA_NODE: 0.001}, {"CPU": 1.0}], ids=["reading", "preparing"])
@pytest.mark.parametrize("name", LAUNCHED)
def test_tasks_of_data_start_nodes_without_gpus(name: str, demand: dict[str, float]) -> None:
    assert set(groups_asked_of_v2(shipped(name), demand, rounds=2)) == {"cpu-data"}
    assert group_chosen_by_v1(shipped(name), demand, unavailable=[]) == "cpu-data"


@pytest.mark.parametrize("demand", [{"CPU": 1.0, DATA_NODE: 0.001}, {"CPU": 1.0}], ids=["reading", "preparing"])
def test_tasks_of_data_start_pods_without_gpus(demand: dict[str, float]) -> None:
    assert set(groups_asked_of_v2(shipped("raycluster.yaml"), demand, rounds=2)) == {"cpu-data"}
    head = shipped("raycluster.yaml")["available_node_types"]["headgroup"]["resources"]
    assert (head["CPU"], head[DATA_NODE]) == (0, 1)


@pytest.mark.parametrize("head_id", ["the-head", ""])
def test_a_head_started_by_hand_needs_its_id_for_version_2(head_id: str) -> None:
    """Without RAY_CLOUD_INSTANCE_ID, version 2 takes the head for one that has not come up, and starts nothing."""
    asked = groups_asked_of_v2(shipped("cluster.yaml"), WORKER, head_id=head_id, rounds=3)
    assert bool(asked) == bool(head_id)


def notes(file: str) -> str:
    from headway.orchestrator.cluster.launcher_file import cluster_page

    return cluster_page(load_cluster(file), None)


@pytest.mark.parametrize(
    ("variable", "command", "version"),
    [
        (None, None, 2),
        ("1", None, 2),
        ("0", None, 1),
        (None, "RAY_enable_autoscaler_v2=0 ray start --head", 1),
        ("0", "export RAY_enable_autoscaler_v2=1; ray start --head", 2),
    ],
)
def test_the_check_names_the_version_that_ray_up_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None, command: str | None, version: int
) -> None:
    monkeypatch.delenv("RAY_UP_enable_autoscaler_v2", raising=False)
    if variable is not None:
        monkeypatch.setenv("RAY_UP_enable_autoscaler_v2", variable)
    (file,) = write_starter_files("aws", str(tmp_path))
    if command is not None:
        config = yaml.safe_load(file.path.read_text())
        config["head_start_ray_commands"] = ["ray stop", command]
        file.path.write_text(yaml.safe_dump(config))
    assert load_cluster(str(file.path)).autoscaler == version
    page = notes(str(file.path))
    assert f"`ray up` starts version {version} of Ray's autoscaler" in page
    assert ("the last name of the alphabet first" in page) == (version == 1)
