"""First check of a worker: it shares the run's storage with the driver, and runs the same versions."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from headway.trainer.distributed.world import World
from headway.trainer.ownership.run_dir import check_same_storage
from headway.trainer.setup.versions import compare_versions, refuse_differences, software_versions

_PACKAGES = ("ray",)
_SHOWN = 8


def driver_versions() -> dict[str, str]:
    """Return the versions of this process, for `check_worker` on the workers."""
    return software_versions(*_PACKAGES)


def check_worker(world: World, run_dir: str, *, lease: str, driver_host: str, versions: Mapping[str, str]) -> list[str]:
    """Check this group of workers, and return a warning for each version that may differ. Every rank must call this.

    Args:
        world: the ranks.
        run_dir: path or URI of the run's folder.
        lease: the driver's lease, which it has written there.
        driver_host: host of the driver.
        versions: the driver's, from `driver_versions`.

    Raises:
        ConfigError: a worker has other versions, or does not see the driver's folder; raised on every rank.
    """
    own = compare_versions(versions, driver_versions())
    ranks = world.all_gather_object((socket.gethostname(), own))
    refuse_differences(ranks, than=f"the driver on {driver_host}")
    check_same_storage(world, run_dir, lease, written_by=f"the driver on {driver_host}")
    # Drivers often run on a machine without a GPU, with another build of torch.
    return [
        f"rank {rank} on {host} has {text}, which the driver on {driver_host} has"
        for rank, (host, each) in enumerate(ranks)
        for text in each.tolerated
        if not text.startswith("torch ")
    ][:_SHOWN]
