"""Checks `cluster.yaml`, the file of Ray's cluster launcher, by Ray's rules and against an experiment, offline."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from headway.trainer.errors import ConfigError

from ..config.experiment import Experiment
from ..config.scaling import Scaling
from ..display.tables import format_table
from .ray_launcher import UP_V2, autoscaler_version, prepare, schema_faults

SHARED = "shared_folders"
"""Key in `metadata`, which Ray ignores: the folders that all nodes share."""

# Ray's default.
_DEFAULT_MAX_WORKERS = 2


@dataclass(frozen=True, kw_only=True)
class Group:
    """One node type of `available_node_types`.

    Attributes:
        name: name of the node type.
        resources: resources of one node by Ray's names; empty if the file does not give them.
        min_nodes, max_nodes: number of nodes; 1 for the head.
        is_head: whether it is the head.
        is_spot: whether the cloud may preempt its nodes; None if unknown.
        priority: among groups that fit equally well, Ray starts the highest first.
        is_detected: whether Ray asks the cloud for the resources, because the file does not give them.
    """

    name: str
    resources: dict[str, float]
    min_nodes: int
    max_nodes: int
    is_head: bool
    is_spot: bool | None
    priority: int = 0
    is_detected: bool = False

    def workers_on_one(self, scaling: Scaling) -> int:
        """Return how many workers fit on one node, by the resources that the file gives."""
        needed = {name: amount for name, amount in scaling.worker_resources.items() if amount}
        return min(int(self.resources.get(name, 0) / amount + 1e-9) for name, amount in needed.items())


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster as its launcher file describes it.

    Attributes:
        name: name of the cluster.
        groups: its node types, the head first.
        max_nodes: the most nodes at a time, without the head.
        shared: folders that all nodes share.
        copied: folders that Ray copies to each node (`file_mounts`).
        is_own: whether the nodes are existing machines (provider.type: local), whose resources Ray detects.
        autoscaler: version of Ray's autoscaler that `ray up` would start from this shell.
    """

    name: str
    groups: tuple[Group, ...]
    max_nodes: int
    shared: tuple[str, ...]
    copied: tuple[str, ...]
    is_own: bool = False
    autoscaler: int = 2

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names of the groups whose resources are not in the file, and that may have nodes."""
        return tuple(group.name for group in self.groups if group.is_detected and group.max_nodes)

    def most_workers(self, scaling: Scaling) -> int:
        """Return how many workers fit when the cluster has scaled up fully."""
        return self._workers(scaling, lambda group: group.max_nodes, self.max_nodes)

    def workers_at_once(self, scaling: Scaling) -> int:
        """Return how many workers fit on the nodes that always run."""
        return self._workers(scaling, lambda group: group.min_nodes, self.max_nodes)

    def _workers(self, scaling: Scaling, nodes: Callable[[Group], int], budget: int) -> int:
        head = sum(group.workers_on_one(scaling) for group in self.groups if group.is_head)
        held = 0
        roomy = sorted((g for g in self.groups if not g.is_head), key=lambda g: -g.workers_on_one(scaling))
        for group in roomy:
            taken = min(nodes(group), budget)
            budget -= taken
            held += taken * group.workers_on_one(scaling)
        return head + held


def load_cluster(path: str) -> Cluster:
    """Read a cluster launcher file, and check it as the installed Ray would.

    Raises:
        ConfigError: there is no such file, or it is invalid; lists all problems.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"there is no file {path}: give a file of Ray's cluster launcher, e.g. cluster.yaml")
    try:
        config = yaml.safe_load(file.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must be a mapping with cluster_name and provider, got a {type(config).__name__}")
    faults, prepared = [*schema_faults(config, is_prepared=False)], config
    if not faults and _is_own(config):
        faults = [*_faults(config)]
    if not faults:
        prepared, problem = prepare(config)
        # Ours name the fields; some stop Ray with an error that does not.
        faults = [*_faults(config if _is_own(config) else prepared)] or ([] if problem is None else [problem])
    if faults:
        raise ConfigError("\n  ".join([f"{path} is not a cluster that Ray can start:", *faults]))
    is_own = _is_own(config)
    groups = _own_machines(config) if is_own else _groups(prepared)
    return Cluster(
        name=prepared["cluster_name"],
        groups=groups,
        max_nodes=groups[-1].max_nodes if is_own else prepared.get("max_workers", _DEFAULT_MAX_WORKERS),
        shared=tuple((config.get("metadata") or {}).get(SHARED, ())),
        copied=tuple(config.get("file_mounts") or ()),
        is_own=is_own,
        autoscaler=autoscaler_version(prepared),
    )


def misfits_of(cluster: Cluster, experiment: Experiment) -> list[str]:
    """Return the reasons why an experiment could never train on a cluster, each with the fix."""
    # The resources of existing machines are unknown until they are up.
    workers = () if cluster.is_own else _worker_faults(cluster, experiment.scaling)
    return [*workers, *_storage_faults(cluster, experiment.storage)]


def _faults(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield violations of what Ray requires besides its schema."""
    yield from _faults_of_own_machines(config) if _is_own(config) else _faults_of_groups(config)
    shared = (config.get("metadata") or {}).get(SHARED, [])
    if not isinstance(shared, list) or not all(str(folder).startswith("/") for folder in shared):
        yield f"metadata.{SHARED} must be a list of absolute folders, got {shared!r}"


def _is_own(config: Mapping[str, Any]) -> bool:
    provider = config.get("provider")
    return isinstance(provider, Mapping) and provider.get("type") == "local"


def _faults_of_own_machines(config: Mapping[str, Any]) -> Iterator[str]:
    for field in ("head_node", "worker_nodes", "available_node_types"):
        if config.get(field):
            yield f"{field} must not be set for existing machines (provider.type: local): Ray detects their resources"
    provider = config["provider"]
    if "coordinator_address" in provider:
        if "max_workers" not in config:
            yield "max_workers is required: the most machines that the coordinator may lease"
    elif not provider.get("head_ip") or not isinstance(provider.get("worker_ips"), list):
        yield "provider.head_ip and the list provider.worker_ips are required, or provider.coordinator_address"


def _faults_of_groups(config: Mapping[str, Any]) -> Iterator[str]:
    types, head = config.get("available_node_types"), config.get("head_node_type")
    if not types:
        kind = config["provider"]["type"]
        yield f"available_node_types is required for {kind}: its node types, each with the resources of one node"
        return
    if head not in types:
        yield f"head_node_type must be one of {', '.join(types)}, got {head!r}"
    for name, group in types.items():
        if name != head and group.get("min_workers", 0) > group.get(
            "max_workers", config.get("max_workers", _DEFAULT_MAX_WORKERS)
        ):
            yield f"available_node_types.{name}: min_workers exceeds max_workers"
    fewest = sum(group.get("min_workers", 0) for name, group in types.items() if name != head)
    if fewest > (most := config.get("max_workers", _DEFAULT_MAX_WORKERS)):
        yield f"max_workers is {most}, but the groups' min_workers add up to {fewest}"


def _groups(config: Mapping[str, Any]) -> tuple[Group, ...]:
    types, head = config["available_node_types"], config["head_node_type"]
    return tuple(_group(name, types[name], head, config) for name in sorted(types, key=lambda name: name != head))


def _own_machines(config: Mapping[str, Any]) -> tuple[Group, ...]:
    """Return what Ray makes of existing machines: one head, and all others that are listed unless limited."""
    named = None if "coordinator_address" in config["provider"] else len(config["provider"]["worker_ips"])
    most = config.get("max_workers", named)
    fewest = config.get("min_workers", named or 0)
    if named is not None:
        most, fewest = min(most, named), min(fewest, named)
    head = Group(name="head", resources={}, min_nodes=1, max_nodes=1, is_head=True, is_spot=False)
    return (head, replace(head, name="machines", min_nodes=fewest, max_nodes=most, is_head=False))


def _group(name: str, plain: Mapping[str, Any], head: str, config: Mapping[str, Any]) -> Group:
    is_head, resources = name == head, plain.get("resources") or {}
    return Group(
        name=name,
        resources={key: float(amount) for key, amount in resources.items()},
        min_nodes=1 if is_head else plain.get("min_workers", 0),
        max_nodes=1 if is_head else plain.get("max_workers", config.get("max_workers", _DEFAULT_MAX_WORKERS)),
        is_head=is_head,
        is_spot=_is_spot(config["provider"]["type"], plain.get("node_config") or {}),
        priority=plain.get("priority", 0),
        # On the other clouds, Ray takes such a node for one without resources.
        is_detected=config["provider"]["type"] == "aws" and "CPU" not in resources,
    )


def _is_spot(provider: str, node: Mapping[str, Any]) -> bool | None:
    match provider:
        case "aws":
            return (node.get("InstanceMarketOptions") or {}).get("MarketType") == "spot"
        case "gcp":
            wishes: Any = node.get("scheduling") or [{}]
            wish = wishes[0] if isinstance(wishes, list) else wishes
            return wish.get("provisioningModel") == "SPOT" or bool(wish.get("preemptible"))
        case "azure":
            return (node.get("azure_arm_parameters") or {}).get("priority") == "Spot"
    return None


def _worker_faults(cluster: Cluster, scaling: Scaling) -> Iterator[str]:
    if cluster.unknown:
        return
    each = ", ".join(f"{amount:g} {name}" for name, amount in scaling.worker_resources.items())
    if not any(group.workers_on_one(scaling) and group.max_nodes for group in cluster.groups):
        unsaid = [group.name for group in cluster.groups if not group.resources]
        yield f"no group has a node that fits a worker ({each}): " + (
            f"give the resources of one node of {', '.join(unsaid)}"
            if unsaid
            else "lower the worker's resources, or add a group of larger nodes"
        )
        return
    most = cluster.most_workers(scaling)
    if most < scaling.min_workers:
        yield (
            f"{scaling.min_workers} workers ({each} each) never fit: fully scaled up, the cluster holds {most}; raise "
            "max_workers (of the cluster or a group), or lower scaling.workers"
        )
        return
    at_once = cluster.workers_at_once(scaling)
    if at_once < scaling.min_workers and scaling.wait is None:
        yield (
            f"scaling.wait is not set, but the running nodes hold only {at_once} of {scaling.min_workers} workers, and "
            "Ray starts nodes only for a run that waits: set it, e.g. scaling.wait=30m"
        )


def _storage_faults(cluster: Cluster, storage: str) -> Iterator[str]:
    if "://" in storage or not any(not group.is_head and group.max_nodes for group in cluster.groups):
        return
    place = PurePosixPath(storage)
    if any(place.is_relative_to(folder) for folder in cluster.shared):
        return
    copied = next((folder for folder in cluster.copied if place.is_relative_to(folder)), None)
    shared = f" (metadata.{SHARED}: {', '.join(cluster.shared)})" if cluster.shared else ""
    yield (
        f"storage {storage} is a separate folder on each node"
        + (f", copied there once (file_mounts: {copied})" if copied else "")
        + ": workers could not see each other's files, and checkpoints would be lost with their nodes; give a URI, "
        f"e.g. storage=s3://bucket/runs, or a folder that all nodes share{shared}"
    )


def cluster_page(cluster: Cluster, experiment: Experiment | None) -> str:
    """Return the cluster's node types, and how many workers of an experiment fit, as text."""
    workers = () if experiment is None else ("WORKERS PER NODE",)
    rows: list[tuple[str, ...]] = [("GROUP", "NODE RESOURCES", *workers, "NODES", "SPOT", "PRIORITY")]
    for group in cluster.groups:
        has = ", ".join(f"{amount:g} {name}" for name, amount in group.resources.items())
        is_unknown = cluster.is_own or group.is_detected
        held = () if experiment is None else ("?" if is_unknown else str(group.workers_on_one(experiment.scaling)),)
        nodes = "head" if group.is_head else f"{group.min_nodes} to {group.max_nodes}"
        spot = {True: "spot", False: "no", None: "?"}[group.is_spot]
        rows.append((group.name, has or "not given", *held, nodes, spot, str(group.priority)))
    return "\n".join([
        f"{cluster.name}: at most {cluster.max_nodes} nodes besides the head",
        format_table(rows),
        *_notes(cluster, None if experiment is None else experiment.scaling),
    ])  # fmt: skip


def cluster_document(cluster: Cluster, experiment: Experiment | None) -> dict[str, Any]:
    """Return the output of `cluster check --json` without the problems. `max_workers` is None if unknown."""
    known = experiment is not None and not cluster.is_own and not cluster.unknown
    return {
        **asdict(cluster),
        "max_workers": cluster.most_workers(experiment.scaling) if experiment is not None and known else None,
        "notes": [*_notes(cluster, None if experiment is None else experiment.scaling)],
    }


def _notes(cluster: Cluster, scaling: Scaling | None) -> Iterator[str]:
    """Yield remarks that are not problems."""
    if scaling is not None:
        yield from _fit_notes(cluster, scaling)
    if not cluster.is_own:
        yield from _autoscaler_notes(cluster)


def _fit_notes(cluster: Cluster, scaling: Scaling) -> Iterator[str]:
    if cluster.is_own:
        yield "the resources of its machines are unknown until they are up, and so is whether workers fit"
        return
    if cluster.unknown:
        yield (
            "Headway cannot check whether workers fit: Ray asks AWS for the resources of "
            f"{', '.join(cluster.unknown)}; to have it checked, give the resources of one node, "
            "e.g. resources: {CPU: 48, GPU: 4}"
        )
        return
    most = cluster.most_workers(scaling)
    yield f"fits {most} worker{'s'[: most != 1]} of this experiment when fully scaled up"
    if scaling.min_workers <= most < scaling.max_workers:
        yield f"of {scaling}, at most {most} will ever train"
    able = [group for group in cluster.groups if not group.is_head and group.workers_on_one(scaling)]
    if able and all(group.is_spot for group in able):
        yield "all groups that fit a worker are spot: the run waits while no such machine is available"


def _autoscaler_notes(cluster: Cluster) -> Iterator[str]:
    """Yield which autoscaler starts the nodes, and which group it chooses among equal ones."""
    if cluster.autoscaler == 2:
        yield "`ray up` starts version 2 of Ray's autoscaler: among equal groups, the highest priority first"
    else:
        yield (
            "`ray up` starts version 1 of Ray's autoscaler, which ignores the priority: among equal groups, the last "
            f"name of the alphabet first; for version 2, unset {UP_V2}, and RAY_enable_autoscaler_v2 in the file"
        )
    for name, others in _stand_ins(cluster):
        yield (
            f"while the cloud refuses to start nodes of {name}, neither version of the autoscaler takes {others} "
            f"in place: the run waits; to switch, set max_workers of {name} to 0 and run `ray up --no-restart` again"
        )


def _stand_ins(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Yield the spot group that is chosen first among equal ones, and the names of the others."""
    alike: dict[str, list[Group]] = {}
    for group in cluster.groups:
        if not group.is_head and group.max_nodes and group.resources:
            alike.setdefault(json.dumps(group.resources, sort_keys=True), []).append(group)
    for groups in alike.values():
        rank = (lambda g: (g.priority, "")) if cluster.autoscaler == 2 else (lambda g: (0, g.name))
        first = max(groups, key=rank)
        if len(groups) > 1 and first.is_spot:
            yield first.name, ", ".join(group.name for group in groups if group is not first)
