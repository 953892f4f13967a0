"""Cluster launcher files are checked offline, against Ray's schema and the needs of an experiment."""

from __future__ import annotations

import copy
import json
import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from headway.orchestrator import Experiment, Scaling
from headway.orchestrator.cli.main import main
from headway.orchestrator.cluster import ray_launcher
from headway.orchestrator.cluster.launcher_file import load_cluster, misfits_of
from headway.orchestrator.cluster.starter_files import render
from headway.trainer import Duration
from headway.trainer.errors import ConfigError
from tests.tiny import TinyConfig, TinyTrainer

ROOT = Path(__file__).parents[3]
OURS: dict[str, Any] = yaml.safe_load((ROOT / "cluster.yaml").read_text())
TARGET = "tests.tiny:TinyTrainer"
WAIT = Duration(30, "seconds")


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return our cluster with one field changed; None removes it."""
    plain = copy.deepcopy(OURS)
    *parents, last = path.split(".")
    node = plain
    for parent in parents:
        node = node[parent]
    if value is None:
        del node[last]
    else:
        node[last] = value
    return plain


def load(tmp_path: Path, plain: Any) -> Any:
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(plain))
    return load_cluster(str(file))


def faults(cluster: Any, *, storage: str = "s3://bucket/runs", **scaling: Any) -> list[str]:
    settings: dict[str, Any] = {"wait": WAIT, **scaling}
    experiment = Experiment(
        name="x", trainer=TinyTrainer, config=TinyConfig(global_batch_size=64), storage=storage,
        scaling=Scaling(**settings),
    )  # fmt: skip
    return misfits_of(cluster, experiment)


def test_ours_holds_what_its_first_lines_say(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (command,) = re.findall(r"(?m)^# +headway (cluster check .*)", (ROOT / "cluster.yaml").read_text())
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    out, err = capsys.readouterr()
    assert ended.value.code == 0, err
    rows = {line.split("  ")[0]: line for line in out.splitlines()}
    assert "0 CPU" in rows["head"]
    assert rows["head"].split()[-3:] == ["head", "no", "0"]
    # CPU workers, 16 on a node with as many CPUs: all twelve nodes, the eight largest first.
    assert rows["gpu-spot"].split() == ["gpu-spot", "48", "CPU,", "4", "GPU", "48", "0", "to", "8", "spot", "10"]
    assert rows["gpu-on-demand"].split()[-5:] == ["0", "to", "4", "no", "0"]
    assert "fits 576 workers of this experiment" in out


def test_ours_is_what_ray_itself_would_start() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(copy.deepcopy(OURS)))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("idle_timout", 5, "'idle_timout' was unexpected"),
        ("provider", None, "'provider' is a required property"),
        ("available_node_types.gpu-spot.resources.GPU", "four", "resources.GPU: 'four' is not of type 'integer'"),
        ("available_node_types.gpu-spot.max_worker", 2, "'max_worker' was unexpected"),
        ("available_node_types", None, "head_node_type must be one of ray.head.default, ray.worker.default"),
        ("docker.container_name", None, "Ray refuses it: Must provide a container & image name"),
        ("provider.type", "external", "Ray cannot read it: KeyError: 'worker_setup_commands'"),
        ("head_node_type", "haed", "head_node_type must be one of cpu-data, gpu-on-demand"),
        ("available_node_types.gpu-spot.min_workers", 9, "gpu-spot: min_workers exceeds max_workers"),
        ("max_workers", 0, None),
        ("provider.type", "nowhere", "Ray refuses it: Unsupported node provider: nowhere"),
        ("docker", {"container_name": "headway"}, "Ray refuses it: Must provide a container & image name"),
        ("metadata", {"shared_folders": "shared"}, "metadata.shared_folders must be a list of absolute folders"),
    ],
)  # fmt: skip
def test_what_ray_would_refuse_is_named_before(tmp_path: Path, path: str, value: Any, message: str | None) -> None:
    plain = changed(path, value)
    if message is None:
        assert load(tmp_path, plain).max_nodes == value
        return
    with pytest.raises(ConfigError, match=r"is not a cluster that Ray can start") as raised:
        load(tmp_path, plain)
    assert message in str(raised.value)


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    plain = changed("max_workers", "many") | {"idle_timout": 1}
    with pytest.raises(ConfigError, match="(?s)idle_timout.*max_workers: 'many'"):
        load(tmp_path, plain)
    plain = changed("max_workers", 3)
    for name in ("gpu-spot", "cpu-data"):
        plain["available_node_types"][name]["min_workers"] = 2
    with pytest.raises(ConfigError, match="max_workers is 3, but the groups' min_workers add up to 4"):
        load(tmp_path, plain)


@pytest.mark.parametrize("text", [None, "a: [", "- a"])
def test_a_file_that_is_none_is_wrong_input(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "cluster.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match="cluster.yaml"):
        load_cluster(str(file))


@pytest.mark.parametrize(
    ("scaling", "fault"),
    [
        ({"workers": 48, "gpus_per_worker": 1}, None),
        ({"workers": 49, "gpus_per_worker": 1}, "fully scaled up, the cluster holds 48"),
        # One GPU of four is unused on each node.
        ({"workers": 13, "gpus_per_worker": 3}, "the cluster holds 12"),
        ({"workers": (2, 64), "gpus_per_worker": 1}, None),
        ({"workers": 1, "gpus_per_worker": 8}, "no group has a node that fits a worker (1 CPU, 8 GPU)"),
        ({"workers": 1, "cpus_per_worker": 49}, "no group has a node that fits a worker"),
        ({"workers": 1, "resources_per_worker": {"fast_disk": 1}}, "no group has a node"),
        ({"workers": 1, "wait": None}, "set it, e.g. scaling.wait=30m"),
    ],
)
def test_workers_that_never_fit_are_told(scaling: dict[str, Any], fault: str | None) -> None:
    found = faults(load_cluster(str(ROOT / "cluster.yaml")), **scaling)
    assert (found == []) if fault is None else (len(found) == 1 and fault in found[0]), found


def test_nodes_that_are_there_anyway_need_no_wait(tmp_path: Path) -> None:
    cluster = load(tmp_path, changed("available_node_types.cpu-data.min_workers", 2))
    assert faults(cluster, workers=32, wait=None) == []
    assert "the running nodes hold only 32 of 33 workers" in faults(cluster, workers=33, wait=None)[0]


def test_what_a_node_has_must_be_said_where_ray_does_not_ask_the_cloud(tmp_path: Path) -> None:
    plain = yaml.safe_load(render("gcp.yaml"))
    for name in ("gpu-spot", "gpu-on-demand", "cpu-data"):
        plain["available_node_types"][name]["resources"] = {}
    assert (
        "give the resources of one node of cpu-data, gpu-on-demand, gpu-spot"
        in faults(load(tmp_path, plain), workers=1)[0]
    )


@pytest.mark.parametrize(
    ("plain", "groups"),
    [
        # The minimal file of Ray's documentation.
        (
            {"cluster_name": "minimal", "provider": {"type": "aws", "region": "us-west-2"}},
            ["ray.head.default", "ray.worker.default"],
        ),
        ({"provider": {"type": "aws", "region": "us-west-2"}, "min_workers": 1}, None),
        ({name: value for name, value in OURS.items() if name != "cluster_name"}, None),
        ({**OURS, "min_workers": 1}, None),
        (changed("available_node_types.gpu-spot.resources", {}), None),
        (changed("available_node_types.gpu-spot.resources", {"fast_disk": 1}), None),
    ],
)
def test_what_ray_takes_is_taken(tmp_path: Path, plain: dict[str, Any], groups: list[str] | None) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(copy.deepcopy(plain)))
    cluster = load(tmp_path, plain)
    assert cluster.name == plain.get("cluster_name", "default")
    if groups is not None:
        assert [group.name for group in cluster.groups] == groups


def test_resources_that_ray_asks_aws_for_cannot_be_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = changed("available_node_types.gpu-spot.resources", {})
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(plain))
    command = [
        "cluster",
        "check",
        str(file),
        TARGET,
        "config.max_steps=1",
        "storage=s3://b/runs",
        "scaling.workers=999",
    ]
    for option in ([], ["--json"]):
        with pytest.raises(SystemExit) as ended:
            main([*command, *option])
        assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "Headway cannot check whether workers fit: Ray asks AWS for the resources of gpu-spot; to have it" in shown
    assert "when fully scaled up" not in shown
    document = json.loads(shown[shown.index("\n{") :])
    assert (document["max_workers"], document["autoscaler"], document["problems"]) == (None, 2, [])
    # Storage is checked all the same.
    assert len(faults(load(tmp_path, plain), storage="/runs", workers=999)) == 1


def test_rays_own_output_is_hidden(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: logged.append(record.getMessage()))
    logger = logging.getLogger("ray.autoscaler._private.util")
    logger.addHandler(handler)
    monkeypatch.setattr(logger, "level", logging.INFO)
    try:
        # The legacy form, which Ray converts with warnings.
        load(tmp_path, {"cluster_name": "old", "provider": {"type": "aws"}, "head_node": {}, "worker_nodes": {}})
    finally:
        logger.removeHandler(handler)
    assert (logged, *capfd.readouterr()) == ([], "", "")


def test_without_rays_private_functions_the_schema_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """See `prepare`: they may move with any version of Ray."""
    monkeypatch.setitem(sys.modules, "ray.autoscaler._private.util", None)
    assert [group.name for group in load(tmp_path, OURS).groups] == ["head", "cpu-data", "gpu-on-demand", "gpu-spot"]
    assert load(tmp_path, changed("cluster_name", None)).name == "default"
    with pytest.raises(ConfigError, match="'idle_timout' was unexpected"):
        load(tmp_path, changed("idle_timout", 5))
    with pytest.raises(ConfigError, match="available_node_types is required for aws"):
        load(tmp_path, changed("available_node_types", None))


def test_without_rays_schema_its_own_checks_remain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """See `schema_faults`. That the schema is there, `test_all_faults_are_told_at_once` shows."""
    monkeypatch.setattr(ray_launcher, "json", SimpleNamespace(loads=lambda _: json.loads("no longer JSON")))
    assert len(load(tmp_path, OURS).groups) == 4
    with pytest.raises(ConfigError, match="'idle_timout' was unexpected"):
        load(tmp_path, changed("idle_timout", 5))


def test_machines_of_ones_own_are_a_cluster_whose_machines_nobody_describes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    own = {
        "cluster_name": "cellar", "auth": {"ssh_user": "ray"},
        "provider": {"type": "local", "head_ip": "10.0.0.1", "worker_ips": ["10.0.0.2", "10.0.0.3"]},
    }  # fmt: skip
    prepared = prepare_config(copy.deepcopy(own))
    validate_config(prepared)
    cluster = load(tmp_path, own)
    (rays,) = prepared["available_node_types"].values()
    head, machines = cluster.groups
    assert (machines.min_nodes, machines.max_nodes) == (rays["min_workers"], rays["max_workers"]) == (2, 2)
    assert (head.is_head, cluster.max_nodes) == (True, 2)
    fewer = load(tmp_path, {**own, "min_workers": 0, "max_workers": 1})
    assert (fewer.groups[1].min_nodes, fewer.groups[1].max_nodes, fewer.max_nodes) == (0, 1, 1)
    cluster = load(tmp_path, own)
    assert faults(cluster, workers=64, gpus_per_worker=8) == []
    # Nothing is known about the machines, except that each has separate folders.
    assert "is a separate folder on each node" in faults(cluster, storage="/runs")[0]
    with pytest.raises(SystemExit) as ended:
        main(["cluster", "check", str(tmp_path / "cluster.yaml"), TARGET, "config.max_steps=1", "storage=s3://b/runs"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert "and so is whether workers fit" in shown
    row = next(line for line in shown.splitlines() if line.startswith("machines"))
    assert row.split() == ["machines", "not", "given", "?", "2", "to", "2", "no", "0"]
    for wrong, message in (
        ({"available_node_types": {"x": {"node_config": {}, "resources": {}}}}, "available_node_types must not be set"),
        ({"provider": {"type": "local"}}, "provider.head_ip and the list provider.worker_ips are required"),
        ({"provider": {"type": "local", "coordinator_address": "10.0.0.1:5"}}, "max_workers is required"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(tmp_path, {**own, **wrong})


@pytest.mark.parametrize(
    ("storage", "fault"),
    [
        ("s3://bucket/runs", None),
        ("/shared", None),
        ("/shared/runs", None),
        ("/sharedruns", "is a separate folder on each node: "),
        ("file:///runs", "is a separate folder on each node: "),
        ("runs", "(metadata.shared_folders: /shared)"),
        ("/home/ray/headway/runs", "copied there once (file_mounts: /home/ray/headway)"),
    ],
)
def test_a_storage_that_other_nodes_do_not_see_is_told(storage: str, fault: str | None) -> None:
    found = faults(load_cluster(str(ROOT / "cluster.yaml")), storage=storage)
    assert (found == []) if fault is None else (len(found) == 1 and fault in found[0]), found


def test_on_one_node_any_folder_will_do(tmp_path: Path) -> None:
    plain = changed("available_node_types.head.resources.CPU", 8)
    plain["available_node_types"] = {"head": plain["available_node_types"]["head"]}
    assert faults(load(tmp_path, plain), storage="/runs", workers=8, wait=None) == []


def test_faults_are_exit_code_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["cluster", "check", str(ROOT / "cluster.yaml"), "tests.tiny:TinyTrainer", "config.max_steps=1"])
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert out.startswith("headway: at most 12 nodes besides the head\nGROUP")
    assert [line.split()[0] for line in err.splitlines()] == ["headway:", "headway:"]
    assert "scaling.wait=30m" in err
    assert "`ray up` starts version 2 of Ray's autoscaler: among equal groups, the highest priority first" in out
    assert "storage=s3://bucket/runs" in err
    with pytest.raises(SystemExit) as ended:
        main(["cluster", "check", str(tmp_path / "none.yaml")])
    assert ended.value.code == 2
