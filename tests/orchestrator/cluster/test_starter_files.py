"""The files of `headway init`: what Ray, YAML and bash accept, and nothing overwritten."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.orchestrator import resolve
from headway.orchestrator.cli.main import main
from headway.orchestrator.cluster.launcher_file import load_cluster
from headway.orchestrator.cluster.starter_files import KINDS, render, write_starter_files
from headway.trainer.errors import ConfigError
from tests.tiny import TinyTrainer

ROOT = Path(__file__).parents[3]
CLOUDS = ["aws", "gcp", "azure"]
WATCH = "nohup headway node watch >/tmp/headway-node-watch.log 2>&1 &"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_written_once_with_its_lines_to_edit(tmp_path: Path, kind: str) -> None:
    files = write_starter_files(kind, str(tmp_path))
    assert {file.path.name for file in files} == set(KINDS[kind][0].values())
    for file in files:
        text = file.path.read_text()
        assert "{{" not in text
        lines = text.splitlines()
        assert file.edits
        assert all("EDIT" in lines[number - 1] for number in file.edits)
        assert "headway" in text
    for file in files[-1:]:
        file.path.write_text("mine")
    for file in files[:-1]:
        file.path.unlink()
    with pytest.raises(ConfigError, match=f"{files[-1].path} exists and is not overwritten"):
        write_starter_files(kind, str(tmp_path))
    assert files[-1].path.read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1, "all files or none"


def test_the_command_names_the_lines_and_the_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, code in ((["aws"], 0), (["aws"], 2), (["gcb"], 2), (["slurm", "--folder", "nowhere"], 2)):
        with pytest.raises(SystemExit) as ended:
            main(["init", *arguments])
        assert ended.value.code == code, arguments
    out, err = capsys.readouterr()
    assert "cluster.yaml: edit the lines marked EDIT (" in out
    assert "to check: headway cluster check cluster.yaml" in out
    assert "is not overwritten" in err
    assert "aws, gcp, azure, kubernetes, slurm, skypilot, docker" in err
    assert "the folder nowhere does not exist: create it, or name another" in err


@pytest.mark.parametrize("kind", CLOUDS)
def test_ray_and_headway_accept_the_launcher_files(tmp_path: Path, kind: str) -> None:
    util = pytest.importorskip("ray.autoscaler._private.util")
    (file,) = write_starter_files(kind, str(tmp_path))
    config = yaml.safe_load(file.path.read_text())
    util.validate_config(util.prepare_config(config))
    cluster = load_cluster(str(file.path))
    assert [(group.name, group.is_spot) for group in cluster.groups] == [
        ("head", False), ("gpu-spot", True), ("gpu-on-demand", False), ("cpu-data", True)
    ]  # fmt: skip
    assert next(group for group in cluster.groups if group.name == "gpu-spot").priority > 0
    assert config["provider"]["type"] == kind
    assert config["worker_start_ray_commands"][-1] == WATCH


def test_the_aws_file_of_this_repository_differs_only_in_how_headway_is_installed() -> None:
    ours, shipped = (yaml.safe_load(text) for text in ((ROOT / "cluster.yaml").read_text(), render("aws.yaml")))
    for config in (ours, shipped):
        del config["docker"]["image"]
        for part in ("file_mounts", "rsync_exclude", "setup_commands"):
            config.pop(part, None)
    assert ours == shipped


@pytest.mark.parametrize(
    ("origin", "requirement"),
    [
        (None, "headway==7.0"),
        ({"url": "file:///home/me/headway", "dir_info": {"editable": True}}, "./headway-7.0-py3-none-any.whl"),
        (
            {"url": "https://example.com/headway.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "headway @ git+https://example.com/headway.git@abc",
        ),
        ({"url": "https://example.com/headway.whl", "archive_info": {}}, "headway @ https://example.com/headway.whl"),
    ],
)
def test_the_image_gets_headway_as_it_is_installed_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: dict[str, Any] | None, requirement: str
) -> None:
    installed = tmp_path / "headway-7.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: headway\nVersion: 7.0\n")
    if origin is not None:
        (installed / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(tmp_path)
    text = render("Dockerfile")
    assert f'ARG HEADWAY="{requirement}"' in text
    # Only a wheel beside the file is copied.
    assert ("\nCOPY *.whl ./" in text) == requirement.startswith("./")


def pods(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [group["template"]["spec"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


def test_the_manifests_prefer_spot_nodes_and_drain_pods(tmp_path: Path) -> None:
    job, cluster = (yaml.safe_load(file.path.read_text()) for file in write_starter_files("kubernetes", str(tmp_path)))
    assert (job["kind"], cluster["kind"]) == ("RayJob", "RayCluster")
    assert job["spec"]["rayClusterSpec"] == cluster["spec"]
    assert set(yaml.safe_load(job["spec"]["runtimeEnvYAML"])) == {"env_vars"}
    program, overrides = job["spec"]["entrypoint"].split(" fit ")
    assert program == "headway"
    experiment = resolve(TinyTrainer, ["config.max_steps=1", *overrides.split()[1:]])
    assert experiment.scaling.wait is not None
    spec = cluster["spec"]
    spot, on_demand, reading = spec["workerGroupSpecs"]
    for group in (spot, on_demand):
        (container,) = group["template"]["spec"]["containers"]
        assert int(container["resources"]["limits"]["nvidia.com/gpu"]) >= experiment.scaling.gpus_per_worker
        assert group["maxReplicas"] >= experiment.scaling.min_workers
    # Version 1 ignores the priority.
    assert (spec["enableInTreeAutoscaling"], spec["autoscalerOptions"]["version"]) == (True, "v2")
    assert spot["priority"] > on_demand["priority"]
    assert "nodeSelector" in spot["template"]["spec"]
    assert "nodeSelector" not in on_demand["template"]["spec"]
    assert "nvidia.com/gpu" not in reading["template"]["spec"]["containers"][0]["resources"]["limits"]
    for pod in pods(spec)[1:]:
        (container,) = pod["containers"]
        lifecycle = container["lifecycle"]
        assert "nohup headway node watch" in lifecycle["postStart"]["exec"]["command"][-1]
        drain = lifecycle["preStop"]["exec"]["command"][-1]
        assert pod["terminationGracePeriodSeconds"] > int(drain.rpartition("sleep ")[2])
        assert {each["name"] for each in container["volumeMounts"]} <= {each["name"] for each in pod["volumes"]}


def test_the_scripts_are_valid_shell_and_the_job_of_skypilot_yaml(tmp_path: Path) -> None:
    (batch,) = write_starter_files("slurm", str(tmp_path))
    (sky,) = write_starter_files("skypilot", str(tmp_path))
    for script in (batch.path.read_text(), yaml.safe_load(sky.path.read_text())["run"]):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
