"""What exact mode cannot keep, and refuses before the first step, with the reason."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NoReturn

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..config import TrainerConfig
from ..data.protocols import BatchStream, SupportsShards
from ..distributed.dtensor import is_sharded
from ..distributed.world import World
from ..errors import ConfigError


def check_exact_config(config: TrainerConfig) -> None:
    """Refuses what exact mode cannot keep, as far as the config tells.

    Raises:
        ConfigError: with the reason.
    """
    parallel = config.parallel
    if parallel.strategy in ("fsdp", "hsdp"):
        _refuse(f"strategy {parallel.strategy!r} adds gradients up in the order of the ranks: take 'ddp'")
    if parallel.compile:
        _refuse(
            "a compiled model takes the kernels that were made for the shapes this process has seen, and every rank "
            "sees others: leave parallel.compile out"
        )
    if config.float8:
        _refuse("products in float8 are made for compiled models, which it cannot keep: leave float8 out")
    if config.halve_on_out_of_memory:
        _refuse("where a batch is cut would depend on the memory of a device: leave halve_on_out_of_memory out")
    if config.global_batch_size is None:
        _refuse("the samples of an update must not depend on the ranks: set global_batch_size")


def check_exact_models(models: Mapping[str, nn.Module]) -> None:
    """Refuses models whose result depends on which rank sees what.

    Raises:
        ConfigError: with the module's name and the reason.
    """
    for name, model in models.items():
        for path, module in model.named_modules():
            where = f"{name}.{path}".rstrip(".")
            if isinstance(module, _NormBase) and module.track_running_stats and module.training:
                _refuse(
                    f"{where}, a {type(module).__name__}, keeps running statistics, and each rank would keep those of "
                    "its own rows: take LayerNorm or GroupNorm, or freeze it"
                )
            if isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None:
                _refuse(f"{where} is compiled, and its kernels depend on the shapes that a process has seen before")
            if getattr(module, "sparse", False) is True:
                _refuse(f"{where} makes sparse gradients: use sparse=False")
        if is_sharded(model):
            _refuse(f"{name} is sharded by its author, and gradients of shards are added up in the order of the ranks")


def check_exact_metrics(metrics: Collection[str]) -> None:
    """Refuses metrics that put together what the ranks have seen.

    Raises:
        ConfigError: with the reason.
    """
    if metrics:
        _refuse(
            f"the metrics of configure_metrics ({', '.join(metrics)}) add up what they get in the order of the ranks; "
            "return from validation_step what has a mean, or compute them from a checkpoint"
        )


def check_exact_data(data: BatchStream, validation: Mapping[str, BatchStream], world: World) -> None:
    """Refuses data that cannot be cut by logical shards.

    Raises:
        ConfigError: with the reason.
    """
    for what, stream in (("training", data), *(("validation", each) for each in validation.values())):
        if stream.guarantee != "exact" or not isinstance(stream, SupportsShards):
            _refuse(
                f"the {what} data, read by {type(stream).__name__} with the guarantee {stream.guarantee!r}, knows no "
                "logical shards that each batch could be cut by: give a ParquetStream or a DataLoader over a map-style "
                "dataset"
            )
    assert isinstance(data, SupportsShards)
    if world.size > data.num_shards:
        _refuse(
            f"{world.size} ranks cannot share the {data.num_shards} parts of a global batch: use fewer ranks, more "
            "shards of the stream, or a smaller micro_batch_size"
        )


def _refuse(reason: str) -> NoReturn:
    raise ConfigError(f"exact=True promises the same bits at every number of ranks, and {reason}")
