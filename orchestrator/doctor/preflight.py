"""The cheap part of the checks, before a run whose workers need more than this node: versions and shared storage."""

from __future__ import annotations

from collections.abc import Mapping

from headway.trainer.errors import ConfigError

from ..errors import StorageError
from .cluster_checks import check_storage
from .node_checks import judge_versions
from .node_facts import package_versions
from .probes import live_nodes, node_probes


def preflight(storage: str, *, worker_resources: Mapping[str, float] | None = None, timeout_s: float = 60.0) -> None:
    """Check that the nodes have the driver's versions and share its storage.

    The driver must be connected to Ray and must call this before workers start. Costs the start of one process on each
    node, in parallel. Returns immediately if only the driver's node could run a worker.

    Args:
        storage: absolute path or URI.
        worker_resources: of one worker, such as `Scaling.worker_resources`; nodes too small for one are not checked.
        timeout_s: for each question to a node; the first one includes the start of a process, slow on a busy machine.

    Raises:
        ConfigError: a version differs, or a node does not answer; names the node, both values and what to do.
        StorageError: the storage cannot be used, or a node does not share it.
    """
    import ray

    nodes = live_nodes(needed=dict(worker_resources or {}))
    if {node.id for node in nodes} <= {ray.get_runtime_context().get_node_id()}:
        return
    here = package_versions()
    with node_probes(nodes, timeout_s=timeout_s) as probes:
        answers, findings = probes.ask("versions", "versions")
        for node, there in answers.items():
            findings += judge_versions(node.name, here, there)
        stored = check_storage(probes, storage)
    failed = [each for each in (*findings, *stored) if each.status == "failed"]
    if not failed:
        return
    lines = [f"{each.node}: {each.found}; {each.advice}" for each in failed]
    text = "the cluster is not ready for this run:\n  " + "\n  ".join(lines)
    raise StorageError(text) if all(each.check == "storage" for each in failed) else ConfigError(text)
