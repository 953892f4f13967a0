"""A process group whose store listens on loopback only, for workers that are all on one machine."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
import ray.train

from ..imports import fast_imports

# Nothing has imported torch before in the controller and the workers. In the user's process, whose objects must not be
# frozen, it is there.
with nullcontext() if "torch" in sys.modules else fast_imports():
    import torch.distributed as dist
    from ray.train.torch import TorchConfig

logger = logging.getLogger(__name__)

_ADDRESS = "127.0.0.1"
# torch's stubs do not export it.
_tcp_store: Any = vars(dist)["TCPStore"]
# The store of this process, which other ranks use until it ends.
_stores: list[Any] = []


@dataclass
class LoopbackTorchConfig(TorchConfig):  # type: ignore[misc]  # Ray has no types
    """`TorchConfig` for workers on one machine; `backend` is required.

    torch's own rendezvous binds the store of rank 0 to all network interfaces, and the store asks for no password.
    """

    @property
    def backend_cls(self) -> type[Any]:
        """The class that sets up the group; Ray calls its methods in the controller."""
        return _LoopbackBackend


class _LoopbackBackend(TorchConfig().backend_cls):  # type: ignore[misc]  # its class depends on the version of Ray
    def on_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
        if not all(hasattr(worker_group, name) for name in ("execute_single", "execute_single_async")):
            # Ray says of neither that it will stay.
            logger.warning("the store of the process group listens on all network interfaces, not only on loopback")
            super().on_start(worker_group, backend_config)
            return
        timeout_s, size = backend_config.timeout_s, len(worker_group)
        port = worker_group.execute_single(0, _open_store, timeout_s)
        # By position: the first argument of `execute_single_async` is called rank, too.
        arguments = (size, port, backend_config.backend, timeout_s)
        ray.get([worker_group.execute_single_async(rank, _join, rank, *arguments) for rank in range(size)])


def _open_store(timeout_s: int) -> int:
    """Open the store in this process, and return its port."""
    with _listening() as listener:
        port: int = listener.getsockname()[1]
        _stores[:] = [
            _tcp_store(
                _ADDRESS, port, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False,
                # The store closes its descriptor.
                master_listen_fd=os.dup(listener.fileno()),
            )
        ]  # fmt: skip
    return port


@contextmanager
def _listening() -> Iterator[socket.socket]:
    with socket.socket() as listener:
        listener.bind((_ADDRESS, 0))
        listener.listen(socket.SOMAXCONN)
        yield listener


def _join(rank: int, size: int, port: int, backend: str, timeout_s: int) -> None:
    context, timeout = ray.train.get_context(), timedelta(seconds=timeout_s)
    os.environ.update(
        MASTER_ADDR=_ADDRESS,
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(context.get_local_rank()),
        LOCAL_WORLD_SIZE=str(context.get_local_world_size()),
        NODE_RANK=str(context.get_node_rank()),
        ACCELERATE_TORCH_DEVICE=str(ray.train.torch.get_device()),
    )
    if "nccl" in backend:
        # As Ray does: a collective that times out ends the process.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    store = _stores[0] if rank == 0 else _tcp_store(_ADDRESS, port, is_master=False, timeout=timeout)
    dist.init_process_group(backend=backend, store=store, rank=rank, world_size=size, timeout=timeout)
