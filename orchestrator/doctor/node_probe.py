"""The actor that runs the checks on one node. Sent there by value, with the functions that it calls."""

from __future__ import annotations

import os
import time
from typing import Any

from .network import accept_connections, connect_to, free_port, join_group
from .node_facts import node_facts, package_versions
from .storage_checks import probe_storage


class NodeProbe:
    """Answers the questions of the driver about one node. Errors of a process group are returned as text.

    Args:
        address: of the node, at which others reach it.
    """

    def __init__(self, address: str) -> None:
        self._address = address

    def facts(self) -> dict[str, Any]:
        """Return all facts about the node."""
        return node_facts()

    def versions(self) -> dict[str, str | None]:
        """Return the versions of Python and of the packages."""
        return package_versions()

    def clock(self) -> float:
        """Return the time of the node in seconds since 1970."""
        return time.time()

    def storage(self, folder: str, name: str, token: str) -> dict[str, Any]:
        """Return the answer of `probe_storage`."""
        return probe_storage(folder, name, token)

    def listen(self) -> int:
        """Accept connections at the port returned."""
        return accept_connections(self._address)

    def connect(self, targets: dict[str, tuple[str, int]], timeout_s: float) -> dict[str, str]:
        """Return the error of a connection to each target, empty if it was accepted."""
        return connect_to(targets, timeout_s)

    def free_port(self) -> int:
        """Return a free port, for the rendezvous of a process group."""
        return free_port(self._address)

    def join(self, backend: str, rank: int, size: int, address: str, port: int, timeout_s: float) -> str:
        """Join a process group, and return the error; empty if the group worked."""
        # Inherited from the program that started Ray, they would describe another group.
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        try:
            join_group(backend, rank, size, address, port, timeout_s)
        except Exception as error:  # torch raises several kinds, which the driver may be unable to import
            return f"{type(error).__name__}: {error}"
        return ""
