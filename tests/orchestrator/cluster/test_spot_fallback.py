"""Ray's own schedulers on the shipped file, alone: how they choose, given what is available.

When a group becomes unavailable for version 2 is another question; see test_autoscaler.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

GROUPS: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parents[3] / "cluster.yaml").read_text())[
    "available_node_types"
]
# As shipped, and in both orders of the alphabet.
NAMES = [("gpu-spot", "gpu-on-demand"), ("a", "z"), ("z", "a")]


def launched_by_v2(groups: Mapping[str, Any], unavailable: str | None) -> dict[str, int]:
    """Return the nodes that version 2 starts for four workers."""
    from ray.autoscaler.v2.instance_manager.config import NodeTypeConfig
    from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
    from ray.autoscaler.v2.utils import ResourceRequestUtil
    from ray.core.generated.autoscaler_pb2 import ResourceRequestByCount

    scores = {unavailable: 0.0} if unavailable else {}
    worker = ResourceRequestUtil.make({"CPU": 1, "GPU": 1})
    reply = ResourceDemandScheduler(event_logger=None).schedule(
        SchedulingRequest(
            disable_launch_config_check=True,
            node_type_configs={
                name: NodeTypeConfig(
                    name=name, min_worker_nodes=group["min_workers"], max_worker_nodes=group["max_workers"],
                    priority=group.get("priority", 0), resources=group["resources"],
                ) for name, group in groups.items()
            },
            max_num_nodes=12,
            resource_requests=[ResourceRequestByCount(request=worker, count=4)],
            cloud_resource_availabilities=scores,
            recoverable_resource_availabilities=scores,
        )
    )  # fmt: skip
    return {each.instance_type: each.count for each in reply.to_launch}


def launched_by_v1(groups: Mapping[str, Any]) -> dict[str, int]:
    """Return the nodes that version 1 starts for four workers."""
    from ray.autoscaler._private.node_provider_availability_tracker import NodeAvailabilitySummary
    from ray.autoscaler._private.resource_demand_scheduler import _default_utilization_scorer, get_nodes_for

    score = partial(_default_utilization_scorer, node_availability_summary=NodeAvailabilitySummary({}))
    workers = [{"CPU": 1, "GPU": 1}] * 4
    return dict(get_nodes_for(dict(groups), {}, "head", 12, workers, score)[0])


def renamed(spot: str, on_demand: str) -> dict[str, Any]:
    names = {"gpu-spot": spot, "gpu-on-demand": on_demand}
    return {names.get(name, name): group for name, group in GROUPS.items() if name != "head"}


@pytest.mark.parametrize(("spot", "on_demand"), NAMES)
def test_version_2_prefers_spot_and_avoids_a_group_marked_unavailable_whatever_the_names(
    spot: str, on_demand: str
) -> None:
    groups = renamed(spot, on_demand)
    assert launched_by_v2(groups, None) == {spot: 1}
    assert launched_by_v2(groups, spot) == {on_demand: 1}


@pytest.mark.parametrize(("spot", "on_demand"), NAMES)
def test_version_1_takes_the_last_of_the_alphabet(spot: str, on_demand: str) -> None:
    """Against its priority: the documentation says so, and to use version 2."""
    assert launched_by_v1(renamed(spot, on_demand)) == {max(spot, on_demand): 1}


def test_ray_up_starts_version_2() -> None:
    """By a variable of a private module, which `headway cluster check` reads as well."""
    from ray.autoscaler._private import commands

    assert 'os.getenv("RAY_UP_enable_autoscaler_v2", "1") == "1"' in Path(commands.__file__).read_text()
