"""The processes that train together, as one of them sees it: the only caller of `torch.distributed` collectives.

Alone, every collective is the identity, so nothing above this file asks whether training is distributed.
"""

from __future__ import annotations

import atexit
import datetime
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ..errors import ConfigError

T = TypeVar("T")

TIMEOUT_S = 1800.0
_GIVE_BACK_S = 0.05
_OWN_GROUP = "headway-own-group"


@dataclass(frozen=True, slots=True)
class World:
    """All ranks of one training, seen from one rank. Every collective must be called by every rank, in the same order.

    Attributes:
        rank: of this process, from 0.
        size: number of processes.
        local_rank: of this process among those of its machine.
        device: where this rank computes.
        rendezvous: where the ranks met, if this object began the process group, and so is to end it.
        control: a second process group on the CPU, for what must not wait for the device; None where the first is one.

    Example:
        >>> world = World.single("cpu")
        >>> world.is_main, world.all_gather_object("alone")
        (True, ['alone'])
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    rendezvous: Rendezvous | None = None
    control: dist.ProcessGroup | None = None

    @classmethod
    def single(cls, device: torch.device | str | None = None) -> World:
        """A world of one process, on the given device or the best one that the machine has."""
        return cls(rank=0, size=1, local_rank=0, device=torch.device(device) if device else _best_device(0))

    @classmethod
    def from_environment(cls, *, timeout_s: float = TIMEOUT_S, with_cpus: bool = False) -> World:
        """Joins the process group that `torchrun` describes in the environment; alone where there is none.

        A process group that exists already is joined, and left standing by `close`. One that this begins is ended by
        `close`, at the latest when Python ends; as a context manager, a world ends it with the block.

        Args:
            timeout_s: after which a collective gives up.
            with_cpus: lets the ranks add up tensors of their CPUs besides, which offloaded gradients need.

        Raises:
            ConfigError: the environment describes a process group only in part.
        """
        if dist.is_available() and dist.is_initialized():
            return cls.attach(timeout_s=timeout_s)
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return cls.single()
        if missing := {"MASTER_ADDR", "MASTER_PORT"} - set(os.environ):
            raise ConfigError(
                f"RANK and WORLD_SIZE are set, but not {' and '.join(sorted(missing))}: start the program with "
                "`torchrun`, or unset RANK and WORLD_SIZE to train in one process"
            )
        device = _best_device(int(os.environ.get("LOCAL_RANK", "0")))
        rendezvous = Rendezvous.from_environment(device, backend(device.type, with_cpus=with_cpus), timeout_s)
        rendezvous.begin_process_group()
        world = replace(cls.attach(timeout_s=timeout_s), rendezvous=rendezvous)
        atexit.register(world.close)
        return world

    @classmethod
    def attach(cls, device: torch.device | str | None = None, *, timeout_s: float = TIMEOUT_S) -> World:
        """Joins the process group that somebody else began and will end; alone where there is none.

        Args:
            device: where this rank computes; without one the best that it has.
            timeout_s: after which a collective gives up, of a group that this begins besides.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return cls.single(device)
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        on = torch.device(device) if device else _best_device(local_rank)
        return cls(
            rank=dist.get_rank(),
            size=dist.get_world_size(),
            local_rank=local_rank,
            device=on,
            control=_new_group(timeout_s) if on.type != "cpu" else None,
        )

    def set_timeout(self, seconds: float) -> None:
        """Set the timeout of all collectives from here on, except in `with_own_group`. Every rank must call this."""
        if self.size > 1:
            # What was begun under the longer time is over: nobody gives up on a rank that is still in its first step.
            self.barrier()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            # A save may take much longer than a step, and its ranks wait for the slowest.
            for group in list(distributed_c10d._world.pg_map):
                if group.group_desc != _OWN_GROUP:
                    set_group_timeout(group, seconds)

    @property
    def owns_process_group(self) -> bool:
        """Whether `close` ends the process group, because this object began it."""
        return self.rendezvous is not None

    @property
    def has_ended(self) -> bool:
        """Whether `close` has ended the process group; `rejoin` begins another."""
        return self.owns_process_group and not dist.is_initialized()

    @property
    def supports_cpu_tensors(self) -> bool:
        """Whether a tensor on the CPU of each rank can be added up by the default process group."""
        return self.size == 1 or not dist.is_initialized() or "cpu:" in dist.get_backend_config()

    def with_own_group(self, *, timeout_s: float = TIMEOUT_S) -> World:
        """The same ranks with a process group of their own, for another thread's collectives. Every rank must call.

        Args:
            timeout_s: after which one of these gives up.
        """
        return replace(self, rendezvous=None, control=_new_group(timeout_s, _OWN_GROUP)) if self.size > 1 else self

    @property
    def is_main(self) -> bool:
        """Whether this is the one rank that writes and prints."""
        return self.rank == 0

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Adds a tensor up over all ranks, in place, and returns it. Same shape and dtype everywhere."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def all_reduce_mean(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replaces tensors by their means over all ranks, in place. Same shapes and dtypes everywhere."""
        if self.size == 1:
            return
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            alike = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in alike])
            dist.all_reduce(flat)
            means = flat.div_(self.size).split([tensor.numel() for tensor in alike])  # type: ignore[no-untyped-call]
            torch._foreach_copy_(alike, [mean.view_as(tensor) for mean, tensor in zip(means, alike, strict=True)])

    def all_to_all(self, tensor: torch.Tensor, *, give: int, take: Sequence[int]) -> torch.Tensor:
        """Gives each rank the next `give` numbers of a flat tensor; returns what this one gets, `take` of each."""
        if self.size == 1:
            return tensor
        received = tensor.new_empty(sum(take))
        dist.all_to_all_single(received, tensor, list(take), [give] * self.size)
        return received

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the flat tensors of all ranks, which are of one length, end to end in the order of the ranks."""
        if self.size == 1:
            return tensor
        joined = tensor.new_empty(self.size * len(tensor))
        dist.all_gather(list(joined.split(len(tensor))), tensor)  # type: ignore[no-untyped-call]
        return joined

    def sum_ints(self, *values: int) -> list[int]:
        """Adds whole numbers up over all ranks. Waits for the other ranks, not for the device."""
        if self.size == 1:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(numbers, group=self.control)
        total: list[int] = numbers.tolist()
        return total

    def all_reduce_max_async(self, tensor: torch.Tensor) -> dist.Work | None:
        """Begins the maximum of a CPU tensor, in place; `wait()` on what it returns ends it. None if there is no wait.

        It never touches the device, so nothing that the device has yet to compute is waited for.
        """
        if self.size == 1:
            return None
        work: dist.Work | None = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.control, async_op=True)
        return work

    def any(self, flag: bool) -> bool:
        """Whether any rank passed True. Waits for the other ranks, not for the device."""
        if self.size == 1:
            return flag
        value = torch.tensor(int(flag), dtype=torch.int32)
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.control)
        return bool(value.item())

    def broadcast(self, value: T) -> T:
        """Returns the main rank's value on every rank; it must pickle. For rare, small things."""
        if self.size == 1:
            return value
        box: list[Any] = [value if self.is_main else None]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]  # type: ignore[no-any-return]

    def broadcast_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Overwrites a tensor with the main rank's, in place, and returns it."""
        if self.size > 1:
            dist.broadcast(tensor, src=0)
        return tensor

    def all_gather_object(self, value: T) -> list[T]:
        """Returns every rank's value, in the order of the ranks, on every rank. For rare, small things."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def barrier(self) -> None:
        """Waits until every rank is here."""
        if self.size > 1:
            dist.barrier(group=self.control)

    def close(self) -> None:
        """Ends the process group if this object began it. May be called twice."""
        if self.owns_process_group and dist.is_initialized():
            dist.destroy_process_group()
            # A model in DDP keeps gloo's threads alive, which may have yet to give back the last tensors they sent;
            # one that does so while Python ends aborts the program. https://github.com/pytorch/pytorch/pull/179291
            time.sleep(_GIVE_BACK_S)

    def rejoin(self) -> None:
        """Begins another process group of the same ranks where `close` has ended the first. Every rank must call this.

        What holds on to the first group, as DDP and FSDP do, does not know of the second.
        """
        if self.rendezvous is not None and self.has_ended:
            self.rendezvous.begin_process_group()
            # Frozen for everybody else: it is the same world, which many hold on to.
            timeout_s = self.rendezvous.timeout.total_seconds()
            object.__setattr__(self, "control", World.attach(self.device, timeout_s=timeout_s).control)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(slots=True)
class Rendezvous:
    """Where the ranks of a process group meet, and meet again once it has ended.

    Attributes:
        store: outlives the process groups: it is what `torchrun` keeps, or the main rank.
        groups: how many process groups have begun.
    """

    store: Store
    rank: int
    size: int
    device: torch.device
    backend: str
    timeout: datetime.timedelta
    groups: int = 0

    @classmethod
    def from_environment(cls, device: torch.device, backend: str, timeout_s: float) -> Rendezvous:
        """Meets the others where `torchrun` says."""
        timeout = datetime.timedelta(seconds=timeout_s)
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        return cls(store, rank, size, device, backend, timeout)

    def begin_process_group(self) -> None:
        """Begins the next one. Every rank must call this."""
        self.groups += 1
        dist.init_process_group(
            self.backend,
            # Without a prefix of its own the second would find the addresses of the first, where nobody listens.
            store=PrefixStore(f"headway-{self.groups}", self.store),
            rank=self.rank,
            world_size=self.size,
            timeout=self.timeout,
            device_id=self.device if self.device.type == "cuda" else None,
        )


def _new_group(timeout_s: float, description: str | None = None) -> dist.ProcessGroup:
    """Begins a process group of all ranks' CPUs. Torch would give it a time of its own, whatever the first one's is."""
    timeout = datetime.timedelta(seconds=timeout_s)
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout, group_desc=description)
    return group


def set_group_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Lets the collectives of a process group give up after so long, from here on.

    Source: torchtitan does the same after its first step, by the same function, in `set_pg_timeouts` of
    torchtitan/distributed/utils.py at cfb9326; torch has no public one.
    """
    distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), group)


def backend(device_type: str, *, with_cpus: bool = False) -> str:
    """Returns what `torch.distributed` calls the way in which ranks on such devices talk."""
    if device_type != "cuda":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if with_cpus else "nccl"


def _best_device(local_rank: int) -> torch.device:
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    # Not MPS: it has neither float64 nor a process group; ask for it by World.single("mps").
    return torch.device("cpu")
