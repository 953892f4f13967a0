"""The nodes of the connected Ray cluster, an actor on each, and their answers, each within a timeout."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from .node_probe import NodeProbe
from .report import Finding, redact

# A storage or a process group that hangs must not keep the actor from answering other questions.
_THREADS = 8


@dataclass(frozen=True)
class Node:
    """A live node of the cluster.

    Attributes:
        id: Ray's.
        name: its host name; with the first digits of the id where several nodes have the same.
        address: at which other nodes reach it.
        num_gpus: as Ray counts them.
    """

    id: str
    name: str
    address: str
    num_gpus: float


def live_nodes(*, needed: dict[str, float] | None = None) -> list[Node]:
    """Return the live nodes of the connected cluster, the driver's first.

    Args:
        needed: resources that a node must have, by name.
    """
    alive = [each for each in ray.nodes() if each["Alive"]]
    hosts = Counter(each["NodeManagerHostname"] for each in alive)
    driver = ray.get_runtime_context().get_node_id()
    found = [
        Node(
            each["NodeID"],
            _name(each, is_unique=hosts[each["NodeManagerHostname"]] == 1),
            each["NodeManagerAddress"],
            each["Resources"].get("GPU", 0.0),
        )
        for each in alive
        if all(each["Resources"].get(name, 0.0) >= amount for name, amount in (needed or {}).items())
    ]
    return sorted(found, key=lambda node: (node.id != driver, node.name))


def _name(node: dict[str, Any], *, is_unique: bool) -> str:
    host = str(node["NodeManagerHostname"])
    return host if is_unique else f"{host}/{node['NodeID'][:6]}"


@dataclass
class Probes:
    """One actor for each node. A node that fails to answer once is not asked again.

    Attributes:
        actors: by node.
        timeout_s: for each question.
    """

    actors: dict[Node, Any]
    timeout_s: float

    def ask(
        self, check: str, method: str, arguments: Callable[[Node], tuple[Any, ...]] = lambda _: (), *, factor: float = 1
    ) -> tuple[dict[Node, Any], list[Finding]]:
        """Ask all nodes at once. Returns the answers, and a finding for each node without one.

        Args:
            check: name of the check, for the findings.
            method: of `NodeProbe`.
            arguments: of the method, for a node.
            factor: of the timeout, for a method that has a timeout itself.
        """
        timeout_s = factor * self.timeout_s
        asked = {node: getattr(actor, method).remote(*arguments(node)) for node, actor in self.actors.items()}
        ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout_s) if asked else ([], [])
        there = set(ready)
        answers, findings = {}, []
        for node, reference in asked.items():
            error = f"no answer within {timeout_s:g} s"
            if reference in there:
                try:
                    answers[node] = ray.get(reference)
                    continue
                except Exception as raised:  # of the method, or of the actor or the node that died
                    error = _describe(raised)
            findings.append(_no_answer(check, node, error))
            del self.actors[node]
        return answers, findings


def _describe(error: Exception) -> str:
    cause = error.cause if isinstance(error, RayTaskError) and error.cause else error
    return redact(f"{type(cause).__name__}: {str(cause).strip() or 'no message'}")[:300]


def _no_answer(check: str, node: Node, error: str) -> Finding:
    advice = (
        f"look at Ray's logs on {node.name} ({node.address}), under session_latest/logs of its temporary folder; "
        "restart Ray there, or remove the node"
    )
    return Finding(check, node.name, "failed", error, advice)


@contextlib.contextmanager
def node_probes(nodes: list[Node], *, timeout_s: float, num_gpus: float = 0) -> Iterator[Probes]:
    """Start an actor on each node, without CPUs, and end them."""
    package = sys.modules[__package__]
    # By value: a node may have no Headway, or another version.
    cloudpickle.register_pickle_by_value(package)
    try:
        actors = {
            node: ray.remote(NodeProbe)
            .options(
                num_cpus=0,
                num_gpus=num_gpus,
                max_concurrency=_THREADS,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
            )
            .remote(node.address)
            for node in nodes
        }
    finally:
        cloudpickle.unregister_pickle_by_value(package)
    started = list(actors.values())
    try:
        yield Probes(actors, timeout_s)
    finally:
        for actor in started:
            ray.kill(actor)
