"""Connects to Ray: the one of this process, else that of RAY_ADDRESS, else a quiet one started here, on loopback."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import ray
from ray.util import placement_group_table

from headway.datasets.data_nodes import RESOURCE as DATA_NODE
from headway.trainer.errors import ConfigError, HeadwayError
from headway.trainer.metrics.units import human_duration

from ..config.scaling import Scaling
from ..train.elastic import slots_capped, target_workers
from .nodes import usable_nodes
from .own_ray import RayThread, on_loopback
from .ray_env import temporary_env

# On a busy machine a head takes longer to start than Ray's 20 s. A cluster that refuses this process would be asked for
# as long.
_PATIENCE = {"RAY_gcs_server_port_wait_time_s": "240"}
_OWN = {
    # Ray Train's placement-group cleaner asks a dashboard whether its run is alive. Without this it would find the
    # dashboard of another Ray on the machine, which does not know the run, and would end it.
    "RAY_API_SERVER_ADDRESS": "http://127.0.0.1:9",
    # This machine is not preempted with notice; the watcher would be one more process to start.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    # Prestarted processes have no runtime environment; all of a run have one, so they would go unused.
    "RAY_prestart_worker_first_driver": "0",
    # Blocks of data that were used up stay in memory for so long: at Ray's 1000, a second of reading.
    "RAY_free_objects_period_milliseconds": "100",
}

# The sockets of collectives of a Ray on loopback.
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
LOOPBACK_ENV = {"GLOO_SOCKET_IFNAME": _LOOPBACK, "NCCL_SOCKET_IFNAME": _LOOPBACK}


def will_start_own_ray() -> bool:
    """Return whether `ray_connection` would start Ray."""
    return not ray.is_initialized() and not os.environ.get("RAY_ADDRESS")


def check_resources(scaling: Scaling) -> None:
    """Check that this machine, if Ray is to be started here, or else the connected cluster has the resources.

    Raises:
        ConfigError: it has not; with what there is and what was asked for.
    """
    if will_start_own_ray():
        _check_machine(scaling)
    elif ray.is_initialized() and scaling.wait is None and (lack := missing_resources(scaling)):
        need = "1 worker needs" if scaling.min_workers == 1 else f"{scaling.min_workers} workers need"
        raise ConfigError(
            f"the cluster has {lack} that {need}: lower scaling.workers or their resources, or set scaling.wait=10m to "
            "wait for nodes"
        )


def _check_machine(scaling: Scaling) -> None:
    cpus, workers = usable_cpus(), scaling.min_workers
    wanted = scaling.reserved_by(workers)["CPU"]
    if wanted > cpus:
        share = math.floor(100 * cpus / workers) / 100
        raise ConfigError(
            f"{workers} workers with {scaling.cpus_per_worker:g} CPU each need {wanted:g} CPUs, and this "
            f"machine has {cpus}: lower scaling.workers, let workers share (scaling.cpus_per_worker={share:.3g}), or "
            "connect to a cluster with RAY_ADDRESS"
        )
    evaluation = scaling.evaluation_worker or {}
    if lack := [name for name in evaluation if name not in ("CPU", "GPU", "memory")]:
        raise ConfigError(
            f"scaling.evaluation_worker needs {', '.join(lack)}, which this machine has not: leave it out, or connect "
            "to a cluster with RAY_ADDRESS"
        )
    if evaluation.get("CPU", 0) > cpus:
        raise ConfigError(
            f"scaling.evaluation_worker needs {evaluation['CPU']:g} CPUs, and this machine has {cpus}: lower it"
        )
    if scaling.gpus_per_worker or evaluation.get("GPU"):
        import torch

        there = torch.cuda.device_count() or torch.xpu.device_count()  # Ray counts both as GPUs
        each = scaling.gpus_per_worker or 0
        needed = each * workers + evaluation.get("GPU", 0)
        if needed > there:
            also = f" and the evaluation worker with {evaluation['GPU']:g}" if "GPU" in evaluation else ""
            fix = "lower scaling.workers or scaling.gpus_per_worker" if there else "leave them out to train on CPUs"
            raise ConfigError(
                f"scaling.workers={workers} with {each:g} GPU each{also} needs {needed:g} GPUs, and this machine has "
                f"{there}: {fix}, or connect to a cluster with RAY_ADDRESS"
            )


def missing_resources(scaling: Scaling) -> str:
    """Return what the connected cluster lacks for the fewest workers, such as "2 of 8 CPU"; empty if nothing."""
    there, needed = ray.cluster_resources(), scaling.reserved_by(scaling.min_workers)
    for name, amount in (scaling.evaluation_worker or {}).items():
        needed[name] = needed.get(name, 0) + amount
    lack = ", ".join(
        f"{there.get(name, 0):g} of {wanted:g} {name}" for name, wanted in needed.items() if there.get(name, 0) < wanted
    )
    if not lack and (held := slots_capped(live_node_resources(scaling), scaling)) < scaling.min_workers:
        each = ", ".join(f"{amount:g} {name}" for name, amount in scaling.worker_resources.items())
        return f"{held} of {scaling.min_workers} places of {each} on one machine{_with_labels(scaling)}"
    return lack


def _with_labels(scaling: Scaling) -> str:
    labels = ", ".join(f"{name}={wanted}" for name, wanted in scaling.label_selector.items())
    return f" with the labels {labels}" if labels else ""


def wait_timeout_error(what: str, scaling: Scaling, *, are_placed: bool = False) -> ConfigError:
    """Return the error for workers that have not started within `Scaling.wait_timeout_s`.

    Args:
        what: was waited for, such as "the workers".
        scaling: their resources.
        are_placed: whether they have got their resources.
    """
    if are_placed:
        why = (
            "they have their resources, but their processes have not started training: importing takes long on a busy "
            "machine, or they cannot reach each other (see `headway doctor`, and -v for the output of Ray)"
        )
    elif lack := missing_resources(scaling):
        why = f"the cluster has {lack}"
    else:
        why = "the cluster is large enough, but its resources are in use"
    return ConfigError(
        f"timed out after {human_duration(scaling.wait_timeout_s)} waiting for {what}: {why}; to wait longer, set "
        "scaling.wait"
    )


def placed_groups() -> set[str]:
    """Return the placement groups of this job that have been placed and may hold workers: those that reserve a CPU.

    The groups of other users of the cluster say nothing about the workers of this one.
    """
    # The id of a group ends with that of its job, also if an actor of the job has created it:
    # https://github.com/ray-project/ray/blob/master/src/ray/design_docs/id_specification.md
    job = ray.get_runtime_context().get_job_id()
    return {
        name
        for name, group in placement_group_table().items()
        # A trial's own process, beside its workers, reserves one byte of memory.
        if name.endswith(job)
        and group["state"] == "CREATED"
        and any(bundle.get("CPU") and DATA_NODE not in bundle for bundle in group["bundles"].values())
    }


def describe_wait(scaling: Scaling, taken: set[str]) -> str | None:
    """Return what workers wait for, such as "waiting for 2 workers: 1 fits (1 CPU free of 4)"; None if there is room.

    Args:
        scaling: their resources.
        taken: `placed_groups` when they started to wait; if there are others now, they are starting.
    """
    there, free, wanted = live_node_resources(scaling), free_node_resources(scaling), scaling.min_workers
    fitting = min(slots_capped(free, scaling), slots_capped(there, scaling))
    if fitting >= wanted or placed_groups() - taken:
        return None
    amounts = ", ".join(
        f"{_total(free, name):g} {name} free of {_total(there, name):g}" for name in scaling.worker_resources
    )
    fit = "1 fits" if fitting == 1 else f"{fitting or 'none'} fit{'' if fitting else 's'}"
    where = f"{amounts}, on machines{_with_labels(scaling)}" if scaling.label_selector else amounts
    return f"waiting for {wanted} worker{'s'[: wanted > 1]}: {fit} ({where})"


def _total(nodes: Iterable[Mapping[str, float]], name: str) -> float:
    return sum(node.get(name, 0) for node in nodes)


def live_node_resources(scaling: Scaling) -> list[dict[str, float]]:
    """Return the resources of each live node of the connected cluster that has the labels which workers need."""
    return [node["Resources"] for node in usable_nodes(scaling)]


def free_node_resources(scaling: Scaling) -> list[dict[str, float]]:
    """Return the unused resources of each live node of the connected cluster that has the labels which workers need.

    Ray has no public call for it. If the private one changes, their sum counts as one node, in which pieces too
    small for a worker seem to suffice.
    """
    try:
        from ray._private.state import available_resources_per_node

        free = available_resources_per_node()
        return [dict(free[node["NodeID"]]) for node in usable_nodes(scaling) if node["NodeID"] in free]
    except (ImportError, AttributeError, TypeError, ValueError):
        return [ray.available_resources()]


def target_workers_now(scaling: Scaling, *, workers: int) -> int:
    """Return how many workers a group with `workers` workers could have on the connected cluster now."""
    return target_workers(live_node_resources(scaling), free_node_resources(scaling), scaling, workers=workers)


def with_gpus(scaling: Scaling) -> Scaling:
    """Return the scaling with GPUs chosen, where `gpus_per_worker` is None: one per worker if there are enough.

    Unchanged if Ray is to be connected but is not yet.
    """
    if scaling.gpus_per_worker is not None:
        return scaling
    if ray.is_initialized():
        gpus = _total(live_node_resources(scaling), "GPU")
    elif will_start_own_ray():
        import torch

        gpus = float(torch.cuda.device_count())
    else:
        return scaling
    free = gpus - (scaling.evaluation_worker or {}).get("GPU", 0)
    return replace(scaling, gpus_per_worker=1 if free >= scaling.min_workers else 0)


def unused_gpus(scaling: Scaling) -> str | None:
    """Return a line about GPUs of the connected cluster that the run leaves unused; None if it leaves none."""
    if (gpus := ray.cluster_resources().get("GPU", 0)) == 0 or scaling.gpus_per_worker:
        return None
    return (
        f"the workers train on CPUs, and {gpus:g} GPU{'s'[: gpus > 1]} of the cluster {'are' if gpus > 1 else 'is'} "
        f"unused: scaling.gpus_per_worker=1 gives one to each of {scaling}, and a fraction shares them"
    )


def clamp_to_machine(scaling: Scaling) -> Scaling:
    """Return the scaling clamped to this machine, if Ray is to be started here, where no nodes can join."""
    if not scaling.is_elastic or not will_start_own_ray():
        return scaling
    import torch

    machine = {"CPU": float(usable_cpus()), "GPU": float(torch.cuda.device_count())}
    fitting = slots_capped([{**dict.fromkeys(scaling.worker_resources, math.inf), **machine}], scaling)
    return replace(scaling, workers=max(fitting, scaling.min_workers))


@contextlib.contextmanager
def ray_connection(scaling: Scaling, *, verbose: bool, say: Callable[[str], None] | None = None) -> Iterator[bool]:
    """Connect to Ray or start one, and undo that at the end. Yields whether it was started here.

    A signal handler that raises ends the wait for Ray.

    Args:
        scaling: a Ray started here gets CPUs for these workers, and two more for reading data.
        verbose: show the output of Ray and its workers.
        say: shows a line while the start takes long.

    Raises:
        HeadwayError: Ray has not started on this machine.
    """
    if ray.is_initialized():
        yield False
        return
    output: dict[str, Any] = {"log_to_driver": verbose, "logging_level": _level(verbose)}
    if not will_start_own_ray():
        thread = RayThread(say, address="auto", **output)
        try:
            thread.connect()
            check_resources(scaling)
            yield False
        finally:
            # Otherwise a thread that waits for workers that were given up would crash the process at exit.
            _shut_down(thread)
        return
    cpus = max(usable_cpus(), math.ceil(scaling.total_resources["CPU"])) + 2
    thread = RayThread(say, address="local", num_cpus=cpus, include_dashboard=False, **output)
    with temporary_env(_OWN), temporary_env({**_PATIENCE, **LOOPBACK_ENV}, unless_set=True):
        try:
            _start(thread)
            yield True
        finally:
            _shut_down(thread)


def _start(thread: RayThread) -> None:
    try:
        with on_loopback():
            thread.connect()
    except HeadwayError:
        raise
    except Exception as error:
        # Most are plain Exceptions and RuntimeErrors.
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise HeadwayError(
            f"Ray could not start on this machine ({cause}): most likely other processes take its CPUs, so stop some "
            "of them and start the run again, or start Ray first (`ray start --head`) and set RAY_ADDRESS=auto"
        ) from error


def _shut_down(thread: RayThread) -> None:
    # While the thread is still in ray.init, it shuts Ray down itself.
    if thread.is_connected:
        ray.shutdown()
    thread.release()


def _level(verbose: bool) -> int:
    return logging.INFO if verbose else logging.ERROR


def usable_cpus() -> int:
    """Return how many CPUs this process may use; in a container fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
