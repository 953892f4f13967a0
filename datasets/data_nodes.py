"""Where reading tasks run on a Ray cluster: on data nodes, which their demand for CPUs starts, and not on the head."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

logger = logging.getLogger("headway.datasets")

RESOURCE = "data"
"""Ray resource of nodes for reading, such as `resources: {CPU: 16, data: 16}` in a launcher file.

A head without CPUs that has it as well, `{CPU: 0, data: 1}`, says that there is such a group before its first node.
"""

SHARE = 0.001
"""What a task takes of the resource. It says where a task may run; CPUs limit how many do."""

_HEAD = "node:__internal_head__"
_NODE_ID = "ray.io/node-id"
# A reservation on nodes that are up takes about 0.1 s. Nodes that are not up are not waited for.
_PLACED_WITHIN_S = 1


class DataNodes:
    """CPUs of data nodes that are reserved for the reading tasks of one stream.

    The reservation is a placement group, so the autoscaler starts nodes for it while it waits, and keeps them until it
    is released. The tasks themselves ask for no CPU and prefer its nodes, by labels that Ray may ignore
    (`fallback_strategy`). So no task ever waits for a CPU: before the nodes come, after one is lost, and where there
    are none, tasks share the CPUs of other nodes, and use the head last. Ray releases the reservation of a process
    that dies.

    Args:
        tasks: number of tasks that run at a time.
        cpus: reserved for each, if the cluster has data nodes; 0 reserves none.
        log_placement: log where the tasks run, when that changes.
    """

    def __init__(self, tasks: int, cpus: float, *, log_placement: bool) -> None:
        import ray
        from ray.util import placement_group

        self._logs_placement, self._logged = log_placement and cpus > 0, ""
        self._group: Any = None
        # Otherwise the autoscaler, which also runs in a Ray of one machine, would report an error to the user.
        if cpus and RESOURCE in ray.cluster_resources():
            self._group = placement_group([{"CPU": cpus, RESOURCE: SHARE}] * tasks)
            self._group.wait(_PLACED_WITHIN_S)

    def task_options(self) -> dict[str, Any]:
        """Return options for tasks that start now: labels of the nodes that they prefer."""
        import ray

        nodes = [node for node in ray.nodes() if node["Alive"]]
        if len(nodes) == 1:
            return {}
        heads = sorted(node["NodeID"] for node in nodes if _HEAD in node["Resources"])
        reserved = sorted(self._reserved & {node["NodeID"] for node in nodes})
        self._log_placement(len(reserved))
        preferred = [f"in({','.join(reserved)})"] if reserved else []
        preferred += [f"!in({','.join(heads)})"] if heads else []
        selectors = [{_NODE_ID: each} for each in preferred] + [{}]
        return {
            "label_selector": selectors[0],
            "fallback_strategy": [{"label_selector": each} for each in selectors[1:]],
        }

    def release(self) -> None:
        """Give the CPUs back. Tasks that are running are not affected."""
        from ray.util import remove_placement_group

        if self._group is not None:
            with contextlib.suppress(Exception):  # Ray may be gone
                remove_placement_group(self._group)
            self._group = None

    @property
    def _reserved(self) -> set[str]:
        """Ids of the nodes with reserved CPUs."""
        from ray.util import placement_group_table

        if self._group is None:
            return set()
        about = placement_group_table(self._group)
        return set(about["bundles_to_node_id"].values()) if about["state"] == "CREATED" else set()

    def _log_placement(self, nodes: int) -> None:
        line = (
            f"reading tasks run on {nodes} data node{'s'[: nodes > 1]}"
            if nodes
            else f"no CPU of a data node (resource {RESOURCE!r}) is free for reading: reading tasks share the CPUs of "
            "other nodes"
        )
        if self._logs_placement and line != self._logged:
            self._logged = line
            # A cluster without data nodes is nothing to warn of.
            logger.log(logging.INFO if nodes or self._group is None else logging.WARNING, "%s", line)
