"""The ranks of a training run. All collectives of `torch.distributed` are called here.

With a single process every collective is the identity, so other modules need not ask whether training is distributed.
"""

from __future__ import annotations

import atexit
import datetime
import itertools
import os
import time
import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from .. import private_torch
from ..errors import ConfigError
from ..private_torch import foreach_copy_

T = TypeVar("T")

TIMEOUT_S = 1800.0
_GLOO_DRAIN_S = 0.05
_BUCKET_BYTES = 25 * 2**20  # as in DDP
NOT_SENT_BY_GLOO = {
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
    torch.int16, torch.uint16, torch.uint32, torch.uint64,
}  # fmt: skip
_group_numbers = itertools.count(1)
_control_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()
_other_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, list[dist.ProcessGroup]] = weakref.WeakKeyDictionary()
"""The groups of training steps by the default group; torch lists all groups only privately."""


@dataclass(frozen=True, slots=True)
class World:
    """All ranks of one training run, seen from one rank. Every rank must call every collective, in the same order.

    Attributes:
        rank: rank of this process, from 0.
        size: number of processes.
        local_rank: rank of this process on its machine.
        device: device of this rank's computations.
        rendezvous: set if this object started, and thus owns, the process group.
        control: gloo group for host-side bookkeeping, which never waits for the device; None if the default group is
            gloo.
        group: process group of the collectives on the device; None for the default one, of all processes.

    Example:
        >>> world = World.single("cpu")
        >>> world.is_main, world.all_gather_object("mine")
        (True, ['mine'])
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    rendezvous: Rendezvous | None = None
    control: dist.ProcessGroup | None = None
    group: dist.ProcessGroup | None = None

    @classmethod
    def single(cls, device: torch.device | str | None = None) -> World:
        """Return a world of one process, on the given device or the best one of the machine."""
        return cls(rank=0, size=1, local_rank=0, device=_device(device, 0))

    @classmethod
    def from_environment(
        cls, *, timeout_s: float = TIMEOUT_S, with_cpus: bool = False, backend: str | None = None
    ) -> World:
        """Join the process group that `torchrun` describes in the environment, or return a single-process world.

        An existing process group is joined, and `close` leaves it running. A group that this method starts is ended by
        `close`, at the end of a `with` block, or at the latest when Python exits.

        Args:
            timeout_s: timeout of collectives.
            with_cpus: also support collectives on CPU tensors, which offloaded gradients need.
            backend: as in `ParallelConfig`; ignored if there is a process group.

        Raises:
            ConfigError: the environment describes a process group incompletely, or torch does not know the backend.
        """
        if dist.is_available() and dist.is_initialized():
            return cls.attach(timeout_s=timeout_s)
        check_backend(backend)
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return cls(rank=0, size=1, local_rank=0, device=_best_device(0, device_types(backend)))
        if missing := {"MASTER_ADDR", "MASTER_PORT"} - set(os.environ):
            raise ConfigError(
                f"RANK and WORLD_SIZE are set, but not {' and '.join(sorted(missing))}: start the program with "
                "`torchrun`, or unset RANK and WORLD_SIZE to train in one process"
            )
        device = _best_device(int(os.environ.get("LOCAL_RANK", "0")), device_types(backend))
        if device.type not in device_types(backend):
            raise ConfigError(
                f"parallel.backend={backend!r} is for {' and '.join(sorted(device_types(backend)))}, but torch finds "
                'no such device here, and would train on the CPU: use "gloo", or leave it out'
            )
        name = backend_for(device.type, with_cpus=with_cpus, backend=backend)
        rendezvous = Rendezvous.from_environment(device, name, timeout_s)
        rendezvous.start_process_group()
        world = replace(cls.attach(timeout_s=timeout_s), rendezvous=rendezvous)
        atexit.register(world.close)
        return world

    @classmethod
    def attach(cls, device: torch.device | str | None = None, *, timeout_s: float = TIMEOUT_S) -> World:
        """Join the existing process group, without owning it, or return a single-process world.

        Args:
            device: device of this rank's computations; by default the best one of the machine whose tensors the group
                can reduce.
            timeout_s: timeout of collectives in the `control` group.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return cls.single(device)
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        on = _device(device, local_rank, device_types(dist.get_backend_config()))
        return cls(
            rank=dist.get_rank(),
            size=dist.get_world_size(),
            local_rank=local_rank,
            device=on,
            control=_control_group(timeout_s) if on.type != "cpu" else None,
        )

    def set_timeout(self, seconds: float) -> None:
        """Set the timeout of all later collectives, except in groups of `with_own_group`. Every rank must call this."""
        if self.size > 1:
            # Otherwise a rank could time out waiting for one that is still in its first step, under the longer timeout.
            self.barrier()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            # In groups of `with_own_group` ranks wait for the slowest save, which may take much longer than a step.
            default = _default_group()
            for group in (default, *_other_groups.get(default, ())):
                private_torch.set_group_timeout(group, seconds)

    @property
    def store(self) -> Store | None:
        """The key-value store of the process group; None for a single process, or if torch does not tell."""
        return private_torch.store_of(_default_group()) if self.size > 1 else None

    @property
    def owns_process_group(self) -> bool:
        """Whether this object started the process group, so that `close` ends it."""
        return self.rendezvous is not None

    @property
    def has_ended(self) -> bool:
        """Whether `close` has ended the process group; `rejoin` starts another."""
        return self.owns_process_group and not dist.is_initialized()

    @property
    def supports_cpu_tensors(self) -> bool:
        """Whether the default process group can reduce CPU tensors."""
        return self.size == 1 or not dist.is_initialized() or "cpu:" in dist.get_backend_config()

    def with_own_group(self, *, timeout_s: float = TIMEOUT_S) -> World:
        """Return these ranks with a separate process group for another thread. Every rank must call this.

        Args:
            timeout_s: timeout of collectives in that group.
        """
        return replace(self, rendezvous=None, control=_new_group(timeout_s)) if self.size > 1 else self

    def subset(self, groups: Sequence[Sequence[int]], *, timeout_s: float = TIMEOUT_S) -> World:
        """Return the group of ranks that has this one; its ranks are numbered from 0. Every rank must call this.

        Args:
            groups: all groups, equal on every rank: each rank is in one of them.
            timeout_s: timeout of collectives in the group.
        """
        own = next(group for group in groups if self.rank in group)
        if len(own) == self.size:
            return self
        if len(own) == 1:
            return World(rank=0, size=1, local_rank=self.local_rank, device=self.device)
        timeout = datetime.timedelta(seconds=timeout_s)
        ranks = [list(group) for group in groups]
        new_groups: Any = dist.new_subgroups_by_enumeration
        group, _ = new_groups(ranks, timeout=timeout)
        control = group
        if self.control is not None:
            control, _ = new_groups(ranks, timeout=timeout, backend="gloo")
        for each in {group, control}:
            set_group_timeout(each, timeout_s)
        return World(
            rank=own.index(self.rank),
            size=len(own),
            local_rank=self.local_rank,
            device=self.device,
            control=control,
            group=group,
        )

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes and prints."""
        return self.rank == 0

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks, in place, and return it. Same shape and dtype on every rank."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_reduce_mean(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace tensors by their means over all ranks, in place. Same shapes and dtypes on every rank.

        Needs memory for one bucket, or for the largest tensor.
        """
        if self.size == 1:
            return
        for alike in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in alike])
            dist.all_reduce(flat, group=self.group)
            means = flat.div_(self.size).split([tensor.numel() for tensor in alike])  # type: ignore[no-untyped-call]
            foreach_copy_(alike, [mean.view_as(tensor) for mean, tensor in zip(means, alike, strict=True)])

    def reserve_for_mean(self, tensors: Sequence[torch.Tensor]) -> None:
        """Allocate and free the memory that `all_reduce_mean` will need; the allocator of a GPU keeps it. Local.

        Raises:
            torch.OutOfMemoryError: there is not enough.
        """
        for alike in _buckets(tensors):
            torch.empty(sum(each.numel() for each in alike), dtype=alike[0].dtype, device=alike[0].device)

    def all_to_all(self, tensor: torch.Tensor, *, give: int, take: Sequence[int]) -> torch.Tensor:
        """Send each rank the next `give` elements of a flat tensor; return the received ones, `take[r]` from rank r."""
        if self.size == 1:
            return tensor
        received = tensor.new_empty(sum(take))
        dist.all_to_all_single(received, tensor, list(take), [give] * self.size, group=self.group)
        return received

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the concatenation of all ranks' flat tensors, in rank order. Same length on every rank."""
        if self.size == 1:
            return tensor
        gathered = tensor.new_empty(self.size * len(tensor))
        dist.all_gather(list(gathered.split(len(tensor))), tensor, group=self.group)  # type: ignore[no-untyped-call]
        return gathered

    def sum_ints(self, *values: int) -> list[int]:
        """Sum integers over all ranks. Waits for the other ranks, not for the device."""
        if self.size == 1:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(numbers, group=self.control)
        total: list[int] = numbers.tolist()
        return total

    def all_reduce_max_async(self, tensor: torch.Tensor) -> dist.Work | None:
        """Start an in-place maximum of a CPU tensor over all ranks; call `wait()` on the result unless it is None.

        Does not touch the device, so it does not wait for pending kernels.
        """
        if self.size == 1:
            return None
        work: dist.Work | None = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.control, async_op=True)
        return work

    def any(self, flag: bool) -> bool:
        """Return whether any rank passed True. Waits for the other ranks, not for the device."""
        if self.size == 1:
            return flag
        value = torch.tensor(int(flag), dtype=torch.int32)
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.control)
        return bool(value.item())

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on every rank; it must be picklable. For rare, small values."""
        if self.size == 1:
            return value
        box: list[Any] = [value if self.is_main else None]
        dist.broadcast_object_list(box, group_src=0, group=self.control)
        return box[0]  # type: ignore[no-any-return]

    def broadcast_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Overwrite a tensor with rank 0's, in place, and return it."""
        if self.size > 1:
            dist.broadcast(_sendable(tensor), group_src=0, group=self.group)
        return tensor

    def broadcast_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite tensors with rank 0's, in place, in few messages. Same shapes and dtypes on every rank."""
        if self.size == 1:
            return
        for alike in _buckets(tensors):
            if len(alike) == 1 and alike[0].is_contiguous():
                self.broadcast_tensor(alike[0])  # no copy of a large one
                continue
            flat = torch.cat([tensor.reshape(-1) for tensor in alike])
            dist.broadcast(_sendable(flat), group_src=0, group=self.group)
            if not self.is_main:
                parts = flat.split([tensor.numel() for tensor in alike])  # type: ignore[no-untyped-call]
                foreach_copy_(alike, [part.view_as(tensor) for part, tensor in zip(parts, alike, strict=True)])

    def all_gather_object(self, value: T) -> list[T]:
        """Return every rank's value, in rank order, on every rank; must be picklable. For rare, small values."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def gather_object(self, value: T) -> list[T]:
        """Return every rank's value, in rank order, on the main rank, and an empty list on others; must be picklable.

        Every rank must call this.
        """
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_main else None
        dist.gather_object(value, values, group_dst=0, group=self.control)
        return values or []

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        if self.size > 1:
            dist.barrier(group=self.control)

    def close(self, *, after_error: bool = False) -> None:
        """End the process group if this object started it. May be called twice.

        Args:
            after_error: whether other ranks may not call this. NCCL would wait for them, and hide the error until its
                watchdog ends the process (https://github.com/pytorch/pytorch/issues/119250): its group is left alone.
        """
        if after_error and self.device.type == "cuda":
            return
        if self.owns_process_group and dist.is_initialized():
            dist.destroy_process_group()
            # A DDP model keeps gloo's threads alive, and these may still hold the last tensors they sent; releasing one
            # while Python exits aborts the program. https://github.com/pytorch/pytorch/pull/179291
            time.sleep(_GLOO_DRAIN_S)

    def rejoin(self) -> None:
        """Start another process group of the same ranks after `close` has ended the first. Every rank must call this.

        DDP and FSDP models keep a reference to the old group and must be wrapped again.
        """
        if self.rendezvous is not None and self.has_ended:
            self.rendezvous.start_process_group()
            # In place despite frozen=True: other objects hold references to this world.
            timeout_s = self.rendezvous.timeout.total_seconds()
            object.__setattr__(self, "control", World.attach(self.device, timeout_s=timeout_s).control)

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self.close(after_error=kind is not None)


@dataclass(slots=True)
class Rendezvous:
    """Starts process groups of the same ranks, one after another.

    Attributes:
        store: kept by `torchrun` or by rank 0; outlives the process groups.
    """

    store: Store
    rank: int
    size: int
    device: torch.device
    backend: str
    timeout: datetime.timedelta

    @classmethod
    def from_environment(cls, device: torch.device, backend: str, timeout_s: float) -> Rendezvous:
        """Connect to the store that `torchrun` describes in the environment."""
        timeout = datetime.timedelta(seconds=timeout_s)
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        return cls(store, rank, size, device, backend, timeout)

    def start_process_group(self) -> None:
        """Start the next process group. Every rank must call this."""
        dist.init_process_group(
            self.backend,
            # Without a new prefix the second group, also that of another trainer in the same program, would find the
            # stale addresses of the first.
            store=PrefixStore(f"headway-{next(_group_numbers)}", self.store),
            rank=self.rank,
            world_size=self.size,
            timeout=self.timeout,
            device_id=self.device if self.device.type == "cuda" else None,
        )


def _sendable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory in a dtype that every backend sends."""
    return (
        tensor.reshape(-1).view(torch.uint8) if tensor.dtype in NOT_SENT_BY_GLOO and tensor.is_contiguous() else tensor
    )


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the tensors in groups of one dtype and limited size, equal on all ranks."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        bucket: list[torch.Tensor] = []
        for tensor in (each for each in tensors if each.dtype == dtype):
            if bucket and sum(each.nbytes for each in bucket) + tensor.nbytes > _BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(tensor)
        yield bucket


def set_group_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Set the timeout of a group's later collectives, which `World.set_timeout` then changes, too."""
    others = _other_groups.setdefault(_default_group(), [])
    if not any(each is group for each in others):
        others.append(group)
    private_torch.set_group_timeout(group, seconds)


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "the process group has not started"
    return group


def _control_group(timeout_s: float) -> dist.ProcessGroup:
    """Return the gloo group beside the default group; it lives as long as that one."""
    default = _default_group()
    if default not in _control_groups:
        _control_groups[default] = _new_group(timeout_s)
    set_group_timeout(_control_groups[default], timeout_s)
    return _control_groups[default]


def _new_group(timeout_s: float) -> dist.ProcessGroup:
    """Start a gloo group of all ranks, with an explicit timeout: torch does not inherit the default group's."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
    return group


def check_backend(backend: str | None, *, known: Collection[str] = ()) -> None:
    """Check that torch knows every backend in a value of `ParallelConfig.backend`.

    Args:
        backend: such as "nccl" or "cpu:gloo,cuda:nccl"; None is valid.
        known: further names, which are registered later.

    Raises:
        ConfigError: torch does not know one of them, or cannot train with it.
    """
    names = [] if backend is None else [each.rpartition(":")[2] for each in backend.split(",")]
    # "fake" moves no data: each rank would train alone. Torch lists MPI and UCC even where it was built without them.
    built = {"fake": False, "mpi": dist.is_mpi_available(), "ucc": dist.is_ucc_available()}
    usable = {
        each
        for each in (*dist.Backend.backend_list, *known)
        if each != dist.Backend.UNDEFINED and built.get(each, True)
    }
    for name in names:
        if name not in usable:
            raise ConfigError(
                f"parallel.backend={backend!r} must name backends that this torch.distributed has "
                f"({', '.join(sorted(usable))}), got {name!r}: correct it, or install and "
                "import the package that registers it"
            )


def device_types(backend: str | None) -> frozenset[str]:
    """Return the types of the devices whose tensors a backend reduces; CPUs and CUDA for None."""
    if backend is None:
        return frozenset(("cpu", "cuda"))
    if ":" in backend:
        return frozenset(each.partition(":")[0] for each in backend.split(","))
    return frozenset(dist.Backend.backend_capability.get(backend, ("cpu", "cuda")))


def backend_for(device_type: str, *, with_cpus: bool = False, backend: str | None = None) -> str:
    """Return the backend, for `init_process_group`, of a group of devices.

    Args:
        device_type: "cuda", "cpu" or another.
        with_cpus: also support collectives on CPU tensors.
        backend: as in `ParallelConfig`.
    """
    chosen = backend or ("nccl" if device_type == "cuda" else "gloo")
    types = device_types(chosen)
    if not with_cpus or "cpu" in types:
        return chosen
    return ",".join(["cpu:gloo", *(f"{each}:{chosen}" for each in sorted(types) if ":" not in chosen)])


def _device(
    given: torch.device | str | None, local_rank: int, types: Collection[str] = ("cpu", "cuda")
) -> torch.device:
    """Return the given device or the best one, after making it current, for streams, events and random states."""
    if given is None:
        return _best_device(local_rank, types)
    device = torch.device(given)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


def _best_device(local_rank: int, types: Collection[str]) -> torch.device:
    """Return this rank's accelerator, after making it current, if it is of one of the types; otherwise the CPU."""
    if torch.cuda.is_available() and "cuda" in types:
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type in types and accelerator.type not in ("cuda", "mps"):
        device = torch.device(accelerator.type, local_rank % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device.index)
        return device
    # Not MPS, which has neither float64 nor a process group; World.single("mps") selects it.
    return torch.device("cpu")
