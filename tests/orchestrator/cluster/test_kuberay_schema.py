"""The Kubernetes manifests of `headway init` against the published schema of the KubeRay operator.

`kuberay-1.7.0-rayjob.json.gz` is the `openAPIV3Schema` of version v1 in
`helm-chart/kuberay-operator/crds/ray.io_rayjobs.yaml` of ray-project/kuberay at tag v1.7.0 (Apache License 2.0),
without its descriptions and its status. Its `rayClusterSpec` is the `spec` of a RayCluster. Rules in CEL
(`x-kubernetes-validations`) are not evaluated.
"""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from headway.orchestrator.cluster.starter_files import write_starter_files

SCHEMA = Path(__file__).with_name("kuberay-1.7.0-rayjob.json.gz")
Manifest = dict[str, Any]


def strict(schema: Any) -> Any:
    """Return a schema that refuses unknown fields, as `kubectl apply --validate=strict` does."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: strict(each) for name, each in schema.items() if name != "properties"}
    if "properties" in schema:
        found["properties"] = {name: strict(each) for name, each in schema["properties"].items()}
        found.setdefault("additionalProperties", schema.get("x-kubernetes-preserve-unknown-fields", False))
    return found


def problems(manifest: Manifest) -> list[str]:
    """Return what KubeRay's schema refuses in a RayJob or a RayCluster, with the path of each."""
    schema = strict(json.loads(gzip.decompress(SCHEMA.read_bytes())))
    if manifest["kind"] == "RayCluster":
        schema["properties"]["spec"] = schema["properties"]["spec"]["properties"]["rayClusterSpec"]
    errors = jsonschema.Draft202012Validator(schema).iter_errors(manifest)
    return [f"{error.json_path}: {error.message}" for error in errors]


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Manifest]:
    files = write_starter_files("kubernetes", str(tmp_path_factory.mktemp("kubernetes")))
    return {found["kind"]: found for found in (yaml.safe_load(file.path.read_text()) for file in files)}


@pytest.mark.parametrize("kind", ["RayJob", "RayCluster"])
def test_kuberay_accepts_the_manifests(manifests: dict[str, Manifest], kind: str) -> None:
    assert manifests[kind]["apiVersion"] == "ray.io/v1"
    assert problems(manifests[kind]) == []


def _misspelt(spec: Manifest) -> None:
    spec["workerGroupSpecs"][0]["maxReplica"] = 4


def _without_a_name(spec: Manifest) -> None:
    del spec["headGroupSpec"]["template"]["spec"]["containers"][0]["name"]


def _of_another_type(spec: Manifest) -> None:
    spec["workerGroupSpecs"][0]["minReplicas"] = "0"


def _another_version(spec: Manifest) -> None:
    spec["autoscalerOptions"]["version"] = "v3"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_misspelt, "maxReplica' was unexpected"),
        (_without_a_name, "'name' is a required property"),
        (_of_another_type, "'0' is not of type 'integer'"),
        (_another_version, "'v3' is not one of"),
    ],
)
def test_the_schema_would_find_a_mistake(
    manifests: dict[str, Manifest], change: Callable[[Manifest], None], problem: str
) -> None:
    mistaken = copy.deepcopy(manifests["RayCluster"])
    change(mistaken["spec"])
    (found,) = problems(mistaken)
    assert problem in found
