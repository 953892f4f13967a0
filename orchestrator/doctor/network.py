"""Checks on a node whether others can be reached: TCP connections, and a process group of torch.

Sent to the nodes by value, as `node_facts` is. Imports torch only for the process group.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

_MAX_PARALLEL = 64


def free_port(address: str) -> int:
    """Return a TCP port of the ephemeral range that is free at an address of this machine."""
    with socket.socket(_family(address)) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def accept_connections(address: str) -> int:
    """Accept and close connections at a free ephemeral port until this process ends, and return the port.

    Ray Train and gloo take such ports, so a firewall that blocks them blocks training.
    """
    server = socket.create_server((address, 0), family=_family(address))

    def accept() -> None:
        while True:
            with contextlib.suppress(OSError):
                server.accept()[0].close()

    threading.Thread(target=accept, daemon=True, name="headway-doctor-accept").start()
    return int(server.getsockname()[1])


def connect_to(targets: dict[str, tuple[str, int]], timeout_s: float) -> dict[str, str]:
    """Try to open a TCP connection to each target.

    Args:
        targets: address and port by name.
        timeout_s: seconds for each connection.

    Returns:
        The error by name, empty if the connection was accepted.
    """

    def attempt(target: tuple[str, int]) -> str:
        try:
            socket.create_connection(target, timeout=timeout_s).close()
        except OSError as error:
            return f"{target[0]}:{target[1]}: {error}"
        return ""

    with ThreadPoolExecutor(_MAX_PARALLEL) as pool:
        return dict(zip(targets, pool.map(attempt, targets.values()), strict=True))


def join_group(backend: str, rank: int, size: int, address: str, port: int, timeout_s: float) -> None:
    """Join a process group of torch, add up a one from each rank, and leave.

    Args:
        backend: "gloo" or "nccl".
        rank: of this process, from 0.
        size: number of processes.
        address: of rank 0, which listens at `port`.
        port: free on rank 0.
        timeout_s: for the rendezvous and the collective.

    Raises:
        RuntimeError: a rank cannot be reached, or the sum is wrong.
    """
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        backend, init_method=f"tcp://{address}:{port}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )
    try:
        ones = torch.ones(1, device="cuda" if backend == "nccl" else "cpu")
        dist.all_reduce(ones)
        if ones.item() != size:
            raise RuntimeError(f"all_reduce of {size} ones is {ones.item():g}")
    finally:
        dist.destroy_process_group()


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
