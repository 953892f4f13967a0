"""The arrangement of ranks: which read different rows, average gradients, and divide sequences or layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..config import ParallelConfig
from .mesh_sizes import MeshSizes
from .world import World, set_group_timeout


@dataclass(frozen=True, slots=True)
class Mesh:
    """All ranks of a run, arranged for several kinds of parallelism.

    Attributes:
        sizes: number of ranks along each dimension.
        data: ranks that read different rows; every other rank works on the same rows as one of these.
        loss: ranks whose losses and gradients are averaged: those of `data`, and those that divide sequences.
        tensor: ranks that divide layers.
        shard_mesh: the mesh for FSDP2; None if weights are not sharded over `loss`.
        tensor_mesh: the mesh for tensor parallelism; None without it.
        sequence_mesh: the mesh for context parallelism; None without it.
    """

    sizes: MeshSizes
    data: World
    loss: World
    tensor: World
    shard_mesh: DeviceMesh | None = None
    tensor_mesh: DeviceMesh | None = None
    sequence_mesh: DeviceMesh | None = None

    @classmethod
    def of(cls, world: World, config: ParallelConfig) -> Self:
        """Arrange the ranks, and create process groups where they are needed. Every rank must call this.

        Raises:
            ConfigError: the config does not fit the number of ranks.
        """
        sizes, timeout_s = MeshSizes.of(config, world.size), config.timeout.amount
        ranks, tp, on_same_rows = range(world.size), sizes.tp, sizes.cp * sizes.tp
        data = world.subset([ranks[first::on_same_rows] for first in range(on_same_rows)], timeout_s=timeout_s)
        loss = data
        if sizes.cp > 1:
            loss = world.subset([ranks[first::tp] for first in range(tp)], timeout_s=timeout_s)
        tensor = world.subset([ranks[first : first + tp] for first in ranks[::tp]], timeout_s=timeout_s)
        kind = world.device.type
        # DDP cannot replicate a model whose layers are divided; FSDP2 with shards over one rank can.
        dims: dict[str, int] = {}
        if loss.size > 1 and config.strategy == "ddp" and tp > 1:
            dims = {"dp_replicate": loss.size, "dp_shard": 1}
        elif loss.size > 1 and config.strategy == "hsdp":
            dims = {"dp_replicate": sizes.dp_replicate, "dp_shard": sizes.dp_shard * sizes.cp}
        elif loss.size > 1 and config.strategy == "fsdp":
            dims = {"dp_shard": loss.size}
        names = tuple(dims)
        dims |= {"tp": tp} if tp > 1 else {}
        whole = init_device_mesh(kind, tuple(dims.values()), mesh_dim_names=tuple(dims)) if dims else None
        sequences = None
        if sizes.cp > 1:
            shape = (data.size, sizes.cp, tp)
            sequences = init_device_mesh(kind, shape, mesh_dim_names=("data", "cp", "tp"))
        for mesh in (whole, sequences):
            for group in mesh.get_all_groups() if mesh is not None else ():
                set_group_timeout(group, timeout_s)
        return cls(
            sizes,
            data,
            loss,
            tensor,
            shard_mesh=whole[names] if whole is not None and names else None,
            tensor_mesh=whole["tp"] if whole is not None and tp > 1 else None,
            sequence_mesh=sequences["cp"] if sequences is not None else None,
        )

    @classmethod
    def without_groups(cls, world: World, config: ParallelConfig) -> Self:
        """Return a mesh for checks and estimates, which use no collectives. Any process may call this.

        Raises:
            ConfigError: the config does not fit the number of ranks.
        """
        sizes = MeshSizes.of(config, world.size)
        data = replace(world, rank=world.rank // (sizes.cp * sizes.tp), size=sizes.num_data)
        return cls(sizes, data, data, World.single(world.device))

    @property
    def divides_weights(self) -> bool:
        """Whether a rank has only a part of the weights."""
        return self.shard_mesh is not None or self.tensor_mesh is not None

    @property
    def counts_rows(self) -> bool:
        """Whether this rank, of those in `loss`, counts the rows or tokens that it works on."""
        return self.loss.rank % self.sizes.cp == 0

    def agree(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return metrics that are equal on every rank. Every rank must call this.

        Args:
            metrics: equal on all ranks of `loss`. Ranks that divide layers compute the same ones, unless a step logs
                on some of them only, or computes them in another order; of each, that of the first rank is returned.
        """
        if self.tensor.size == 1:
            return metrics
        agreed: dict[str, float] = {}
        for each in reversed(self.tensor.all_gather_object(metrics)):
            agreed |= each
        return dict(sorted(agreed.items()))

    @property
    def ranks_on_same_rows(self) -> int:
        """Number of ranks that work on the same rows."""
        return self.sizes.cp * self.sizes.tp
