"""The number of ranks along each dimension of parallelism, without torch: the orchestrator checks these first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from ..config import ParallelConfig
from ..errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSizes:
    """Number of ranks along each dimension of the mesh; the product is the number of ranks.

    Dimensions are ordered from the outermost, as in torchtitan: ranks that exchange most are neighbours.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def num_data(self) -> int:
        """Number of ranks that read different rows."""
        return self.dp_replicate * self.dp_shard

    @classmethod
    def of(cls, config: ParallelConfig, num_ranks: int) -> Self:
        """Return the sizes for a number of ranks; with one rank all are 1.

        Raises:
            ConfigError: the config does not fit the number of ranks.
        """
        if num_ranks == 1:
            return cls()
        data, rest = divmod(num_ranks, config.cp * config.tp)
        if rest:
            sizes = " x ".join(f"parallel.{name}={n}" for name, n in (("tp", config.tp), ("cp", config.cp)) if n > 1)
            raise ConfigError(f"{sizes} must divide the number of ranks, {num_ranks}")
        ranks = f"{num_ranks}" + (f" / (tp x cp) = {data}" if data != num_ranks else "")
        replicate, shard = config.dp_replicate, config.dp_shard
        match config.strategy:
            case "none":
                if data > 1:
                    raise ConfigError(
                        f"parallel.strategy='none' trains in one process, but there are {ranks} ranks: use 'ddp' or "
                        "'fsdp'"
                    )
                replicate = shard = 1
            case "ddp":
                replicate, shard = replicate or data, 1
            case "fsdp":
                replicate, shard = 1, shard or data
            case "hsdp":
                given = "dp_replicate" if shard is None else "dp_shard"
                size = replicate if shard is None else shard
                assert size is not None
                if data % size:
                    raise ConfigError(
                        f"parallel.{given}={size} (strategy 'hsdp') must divide the number of ranks, {ranks}"
                    )
                replicate, shard = replicate or data // size, shard or data // size
        if replicate * shard != data:
            raise ConfigError(
                f"parallel.dp_replicate={replicate} x parallel.dp_shard={shard} (strategy {config.strategy!r}) must be "
                f"the number of ranks, {ranks}: leave out those that follow from the number of ranks"
            )
        return cls(dp_replicate=replicate, dp_shard=shard, cp=config.cp, tp=config.tp)
