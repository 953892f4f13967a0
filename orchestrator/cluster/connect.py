"""The Ray to train on: the one that this process is connected to, the one of RAY_ADDRESS, or a quiet one of our own."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import replace

import ray
from ray.util import placement_group_table

from headway.trainer.errors import ConfigError, HeadwayError
from headway.trainer.metrics.units import human_duration

from ..config.experiment import Scaling
from ..train.elastic import slots_capped, target_workers
from .ray_env import temporary_env

_OWN = {
    # Ray Train's placement-group cleaner asks a dashboard whether its run is alive. Ours has none; without this it
    # would find that of another Ray on the machine, which does not know the run, and would end it.
    "RAY_API_SERVER_ADDRESS": "http://127.0.0.1:9",
    # Nobody takes the machine away from under us with notice; the watcher is a process to start.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    # Processes without an environment, of which a run has no use: all of its own have one.
    "RAY_prestart_worker_first_driver": "0",
    # Blocks of data that were used up stay in memory for so long: at Ray's 1000, a second of reading.
    "RAY_free_objects_period_milliseconds": "100",
}


def will_start_own_ray() -> bool:
    """Whether `connected` would start a Ray."""
    return not ray.is_initialized() and not os.environ.get("RAY_ADDRESS")


def check_resources(scaling: Scaling) -> None:
    """Refuses what this machine can never give, if Ray will be ours, or else what the connected Ray does not have.

    Raises:
        ConfigError: says what there is and what was asked for.
    """
    if will_start_own_ray():
        _check_machine(scaling)
    elif ray.is_initialized() and scaling.wait is None and (lack := missing_resources(scaling)):
        raise ConfigError(
            f"the cluster has {lack} that {scaling.min_workers} workers want: lower scaling.workers, or say how "
            "long to wait for more machines, as in scaling.wait=10m"
        )


def _check_machine(scaling: Scaling) -> None:
    cpus, workers = usable_cpus(), scaling.min_workers
    wanted = scaling.reserved_by(workers)["CPU"]
    if wanted > cpus:
        share = math.floor(100 * cpus / workers) / 100
        raise ConfigError(
            f"{workers} workers with {scaling.cpus_per_worker:g} CPU each want {wanted:g} CPUs, and this "
            f"machine has {cpus}: lower scaling.workers, let workers share (scaling.cpus_per_worker={share:.3g}), or "
            "connect to a cluster with RAY_ADDRESS"
        )
    if scaling.gpus_per_worker:
        import torch

        there = torch.cuda.device_count()
        if scaling.reserved_by(workers)["GPU"] > there:
            raise ConfigError(
                f"{workers} workers with {scaling.gpus_per_worker:g} GPU each want "
                f"{scaling.reserved_by(workers)['GPU']:g} GPUs, and this machine has {there}: lower one of them"
            )


def missing_resources(scaling: Scaling) -> str:
    """Says what the connected cluster lacks for the fewest workers, as "2 of 8 CPU"; empty if nothing."""
    there = ray.cluster_resources()
    lack = ", ".join(
        f"{there.get(name, 0):g} of {wanted:g} {name}"
        for name, wanted in scaling.reserved_by(scaling.min_workers).items()
        if there.get(name, 0) < wanted
    )
    if not lack and (held := slots_capped(live_node_resources(), scaling)) < scaling.min_workers:
        each = ", ".join(f"{amount:g} {name}" for name, amount in scaling.worker_resources.items())
        return f"{held} of {scaling.min_workers} places of {each} on one machine"
    return lack


def wait_timeout_error(what: str, scaling: Scaling) -> ConfigError:
    """Returns the error of who has waited for workers as long as `Scaling.wait_timeout_s`.

    Args:
        what: has not come up, as "the workers have".
        scaling: what they want.
    """
    lack = missing_resources(scaling)
    return ConfigError(
        f"{what} not come up in {human_duration(scaling.wait_timeout_s)}: "
        + (f"the cluster has {lack}" if lack else "the cluster could hold them, and is busy with something else")
        + "; to wait longer, set scaling.wait"
    )


def placed_groups() -> set[str]:
    """Returns the placement groups of the cluster that have their place, but for those that hold no CPU."""
    return {
        name
        for name, group in placement_group_table().items()
        # The process of a trial beside its workers reserves no more than a byte of memory.
        if group["state"] == "CREATED" and any(bundle.get("CPU") for bundle in group["bundles"].values())
    }


def describe_wait(scaling: Scaling, taken: set[str]) -> str | None:
    """Says what workers wait for, as "waiting for 2 workers: 1 fits (1 CPU free of 4)"; None if there is room.

    Args:
        scaling: what they want.
        taken: `placed_groups` of when they began to wait; where there are others now, they are coming up.
    """
    there, free, wanted = ray.cluster_resources(), ray.available_resources(), scaling.min_workers
    fitting = min(slots_capped([free], scaling), slots_capped(live_node_resources(), scaling))
    if fitting >= wanted or placed_groups() - taken:
        return None
    amounts = ", ".join(
        f"{free.get(name, 0):g} {name} free of {there.get(name, 0):g}" for name in scaling.worker_resources
    )
    fit = "1 fits" if fitting == 1 else f"{fitting or 'none'} fit{'' if fitting else 's'}"
    return f"waiting for {wanted} worker{'s'[: wanted > 1]}: {fit} ({amounts})"


def live_node_resources() -> list[dict[str, float]]:
    """Returns the resources of each machine of the connected cluster."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def target_workers_now(scaling: Scaling, *, workers: int) -> int:
    """Returns how many workers a group may have that has so many now, on the connected cluster."""
    return target_workers(live_node_resources(), ray.available_resources(), scaling, workers=workers)


def clamp_to_machine(scaling: Scaling) -> Scaling:
    """Returns what of it there can be: as many workers as this machine holds, if Ray will be ours and cannot grow."""
    if not scaling.is_elastic or not will_start_own_ray():
        return scaling
    import torch

    machine = {"CPU": float(usable_cpus()), "GPU": float(torch.cuda.device_count())}
    fitting = slots_capped([{**dict.fromkeys(scaling.resources_per_worker, math.inf), **machine}], scaling)
    return replace(scaling, workers=max(fitting, scaling.min_workers))


@contextlib.contextmanager
def ray_connection(scaling: Scaling, *, verbose: bool) -> Iterator[bool]:
    """Makes sure of a Ray; who connects or starts one for this leaves or ends it. Gives whether it was started.

    Args:
        scaling: a Ray of our own gets CPUs for these workers, and some for reading data beside them.
        verbose: shows what Ray and its workers print.
    """
    if ray.is_initialized():
        yield False
        return
    if not will_start_own_ray():
        ray.init(address="auto", log_to_driver=verbose, logging_level=_level(verbose))
        try:
            check_resources(scaling)
            yield False
        finally:
            # Or a thread that waits for workers, which have been given up, would crash the process at its exit.
            ray.shutdown()
        return
    with temporary_env(_OWN):
        try:
            _start_ray(scaling, verbose=verbose)
            yield True
        finally:
            ray.shutdown()


def _start_ray(scaling: Scaling, *, verbose: bool) -> None:
    try:
        ray.init(
            address="local",
            num_cpus=max(usable_cpus(), math.ceil(scaling.total_resources["CPU"])) + 2,
            include_dashboard=False,
            log_to_driver=verbose,
            logging_level=_level(verbose),
        )
    except Exception as error:
        # A plain Exception, which Ray raises where its own processes have not come up within 30 s.
        if "timed out during startup" not in str(error):
            raise
        raise HeadwayError(
            "Ray has not started on this machine within 30 s, most likely because other processes take its CPUs: stop "
            "some of them and start the run again, or start Ray first (`ray start --head`) and set RAY_ADDRESS=auto"
        ) from error


def _level(verbose: bool) -> int:
    return logging.INFO if verbose else logging.ERROR


def usable_cpus() -> int:
    """CPUs that this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
