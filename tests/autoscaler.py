"""Ray's own autoscalers, version 1 and 2, over a stand-in for a cloud. No Ray is started."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ray.autoscaler._private.node_provider_availability_tracker import NodeProviderAvailabilityTracker
from ray.autoscaler._private.resource_demand_scheduler import ResourceDemandScheduler
from ray.autoscaler.node_launch_exception import NodeLaunchException
from ray.autoscaler.node_provider import NodeProvider
from ray.autoscaler.tags import (
    NODE_KIND_HEAD,
    TAG_RAY_NODE_KIND,
    TAG_RAY_NODE_STATUS,
    TAG_RAY_USER_NODE_TYPE,
)
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig, InstanceReconcileConfig
from ray.autoscaler.v2.instance_manager.instance_manager import InstanceManager
from ray.autoscaler.v2.instance_manager.instance_storage import InstanceStorage
from ray.autoscaler.v2.instance_manager.node_provider import NodeProviderAdapter
from ray.autoscaler.v2.instance_manager.reconciler import Reconciler
from ray.autoscaler.v2.instance_manager.storage import InMemoryStorage
from ray.autoscaler.v2.instance_manager.subscribers.cloud_instance_updater import CloudInstanceUpdater
from ray.autoscaler.v2.instance_manager.subscribers.cloud_resource_monitor import CloudResourceMonitor
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler as SchedulerV2
from ray.core.generated.autoscaler_pb2 import (
    ClusterResourceState,
    NodeState,
    NodeStatus,
    ResourceRequest,
    ResourceRequestByCount,
)

_HEAD = "the-head"


class Cloud(NodeProvider):
    """A cloud that refuses to start some groups, and starts others without Ray ever coming up on them.

    Attributes:
        asked: how often it was asked to start nodes, by group.
    """

    def __init__(self, head_type: str, *, refuses: Collection[str] = ()) -> None:
        super().__init__({"type": "external"}, "stand-in")
        self.asked: Counter[str] = Counter()
        self._refuses = refuses
        self._nodes: dict[str, dict[str, str]] = {
            _HEAD: {
                TAG_RAY_NODE_KIND: NODE_KIND_HEAD, TAG_RAY_USER_NODE_TYPE: head_type,
                TAG_RAY_NODE_STATUS: "up-to-date",
            }
        }  # fmt: skip

    def create_node(self, node_config: Any, tags: dict[str, str], count: int) -> dict[str, Any]:
        """Start nodes, or refuse as EC2 does without capacity."""
        group = tags[TAG_RAY_USER_NODE_TYPE]
        self.asked[group] += 1
        if group in self._refuses:
            raise NodeLaunchException("InsufficientInstanceCapacity", "no capacity", None)
        self._nodes |= {f"{group}-{len(self._nodes) + number}": dict(tags) for number in range(count)}
        return {}

    def non_terminated_nodes(self, tag_filters: Mapping[str, str]) -> list[str]:
        """Return the nodes with these tags."""
        return [name for name, tags in self._nodes.items() if tag_filters.items() <= tags.items()]

    def node_tags(self, node_id: str) -> dict[str, str]:
        """Return the tags of a node."""
        return self._nodes[node_id]

    def is_running(self, node_id: str) -> bool:
        """Return whether there is such a node."""
        return node_id in self._nodes

    def is_terminated(self, node_id: str) -> bool:
        """Return whether there is no such node."""
        return node_id not in self._nodes

    def internal_ip(self, node_id: str) -> str:
        """Return a name for the node."""
        return node_id

    def terminate_node(self, node_id: str) -> None:
        """End a node."""
        self._nodes.pop(node_id, None)


class _AtOnce:
    """An executor without threads."""

    def submit(self, call: Callable[..., object], *arguments: object) -> None:
        call(*arguments)


class _Config:
    """The part of a config reader that the node provider's adapter uses."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = AutoscalingConfig(dict(config), skip_content_hash=True)

    def get_cached_autoscaling_config(self) -> AutoscalingConfig:
        return self._config


def groups_asked_of_v2(
    config: Mapping[str, Any],
    demand: Mapping[str, float],
    *,
    refuses: Collection[str] = (),
    allocation_timeout_s: int = 3600,
    head_id: str = _HEAD,
    rounds: int = 6,
) -> Counter[str]:
    """Run version 2 of the autoscaler; return how often it asked the cloud for nodes of each group.

    Args:
        config: a launcher file, or what Ray makes of a KubeRay manifest.
        demand: resources of one worker that waits.
        refuses: groups that the cloud refuses to start. Nodes of others are started, but Ray never comes up on them,
            as in a pod that stays pending.
        allocation_timeout_s: after this long, the autoscaler gives up on a node without Ray.
        head_id: the head's RAY_CLOUD_INSTANCE_ID.
        rounds: decisions of the autoscaler.
    """
    reader = _Config(config)
    autoscaling = reader.get_cached_autoscaling_config()
    limits = InstanceReconcileConfig(allocate_status_timeout_s=allocation_timeout_s)
    autoscaling.get_instance_reconcile_config = lambda: limits
    cloud = Cloud(autoscaling.get_head_node_type(), refuses=refuses)
    adapter = NodeProviderAdapter(v1_provider=cloud, config_reader=reader)
    # Otherwise threads ask the cloud, and how far they have come is a matter of time.
    adapter._main_executor = adapter._node_launcher_executors = _AtOnce()
    monitor = CloudResourceMonitor()
    storage = InstanceStorage(cluster_id="session", storage=InMemoryStorage())
    manager = InstanceManager(storage, [CloudInstanceUpdater(cloud_provider=adapter), monitor])
    scheduler = SchedulerV2()
    is_head = {"node:__internal_head__": 1.0}
    head = NodeState(
        node_id=b"h" * 28, instance_id=head_id, ray_node_type_name=autoscaling.get_head_node_type(),
        node_ip_address=_HEAD, status=NodeStatus.RUNNING, total_resources=is_head, available_resources=is_head,
    )  # fmt: skip
    waiting = ResourceRequestByCount(request=ResourceRequest(resources_bundle=dict(demand)), count=1)
    for version in range(1, rounds + 1):
        Reconciler.reconcile(
            instance_manager=manager, scheduler=scheduler, cloud_provider=adapter, cloud_resource_monitor=monitor,
            ray_cluster_resource_state=ClusterResourceState(
                cluster_resource_state_version=version, cluster_session_name="session", node_states=[head],
                pending_resource_requests=[waiting],
            ),
            non_terminated_cloud_instances=adapter.get_non_terminated(), cloud_provider_errors=adapter.poll_errors(),
            ray_install_errors=[], ray_stop_errors=[], autoscaling_config=autoscaling,
        )  # fmt: skip
    return cloud.asked


def group_chosen_by_v1(config: Mapping[str, Any], demand: Mapping[str, float], *, unavailable: Collection[str]) -> str:
    """Return the group that version 1 of the autoscaler starts a node of, after the cloud has refused some."""
    prepared = _Config(config).get_cached_autoscaling_config().get_raw_config_mutable()
    types, head = prepared["available_node_types"], prepared["head_node_type"]
    scheduler = ResourceDemandScheduler(Cloud(head), types, prepared["max_workers"], head, upscaling_speed=1)
    tracker = NodeProviderAvailabilityTracker()
    for group in unavailable:
        tracker.update_node_availability(
            group, int(time.time()), NodeLaunchException("InsufficientInstanceCapacity", "no capacity", None)
        )
    chosen, _ = scheduler.get_nodes_to_launch(
        [_HEAD], {}, [dict(demand)], {_HEAD: {}}, [], {_HEAD: {}}, [], node_availability_summary=tracker.summary()
    )
    (group,) = chosen
    return str(group)
