"""Check before the first step that config, models, metrics and data support exact mode."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NoReturn

from torch import nn

from ..config import TrainerConfig
from ..data.protocols import BatchStream, SupportsShards
from ..distributed.dtensor import is_sharded
from ..distributed.world import World
from ..errors import ConfigError
from ..private_torch import is_compiled


def check_exact_config(config: TrainerConfig) -> None:
    """Check the config.

    Raises:
        ConfigError: a setting does not support exact mode.
    """
    parallel = config.parallel
    if parallel.strategy in ("fsdp", "hsdp"):
        _refuse(f"strategy {parallel.strategy!r} adds gradients in the order of the ranks: use 'ddp'")
    if parallel.tp > 1 or parallel.cp > 1:
        _refuse("ranks that divide layers or sequences add in another order: remove parallel.tp and parallel.cp")
    if parallel.compile:
        _refuse(
            "a compiled model uses kernels for the shapes its process has seen, which differ between ranks: "
            "remove parallel.compile"
        )
    if config.float8:
        _refuse("float8 is made for compiled models, whose kernels differ between ranks: remove float8")
    if config.halve_on_out_of_memory:
        _refuse("the split of a batch would depend on the memory of a device: remove halve_on_out_of_memory")
    if config.global_batch_size is None:
        _refuse("the samples of an update must not depend on the number of ranks: set global_batch_size")


def check_exact_models(models: Mapping[str, nn.Module]) -> None:
    """Check that the models' results do not depend on which rank sees which rows.

    Raises:
        ConfigError: a module does not support exact mode; names it and the reason.
    """
    for name, model in models.items():
        for path, module in model.named_modules():
            where = f"{name}.{path}".rstrip(".")
            if getattr(module, "track_running_stats", False) is True and module.training:
                _refuse(
                    f"{where}, a {type(module).__name__}, keeps running statistics, and each rank would keep those of "
                    "its own rows: use LayerNorm or GroupNorm, or freeze it"
                )
            if is_compiled(module):
                _refuse(f"{where} is compiled, and its kernels depend on the shapes that the process has seen")
            if getattr(module, "sparse", False) is True:
                _refuse(f"{where} has sparse gradients: use sparse=False")
        if is_sharded(model):
            _refuse(
                f"{name} is sharded in configure_models(), and gradients of shards are added in the order of the ranks"
            )


def check_exact_metrics(metrics: Collection[str]) -> None:
    """Check that `configure_metrics` returned no metrics.

    Raises:
        ConfigError: there are some.
    """
    if metrics:
        _refuse(
            f"the metrics of configure_metrics ({', '.join(metrics)}) accumulate in the order of the ranks: return "
            "values from validation_step, which are averaged, or compute the metrics from a checkpoint"
        )


def check_exact_data(data: BatchStream, validation: Mapping[str, BatchStream], world: World) -> None:
    """Check that the data can be split by logical shards, and that there are enough of them.

    Raises:
        ConfigError: the data cannot be split so, or there are more ranks than shards.
    """
    for what, stream in (("training", data), *(("validation", each) for each in validation.values())):
        if stream.guarantee != "exact" or not isinstance(stream, SupportsShards):
            _refuse(
                f"the {what} data, read by {type(stream).__name__} with the guarantee {stream.guarantee!r}, has no "
                "logical shards to split a batch by: use a ParquetStream, or a DataLoader over a map-style dataset"
            )
    assert isinstance(data, SupportsShards)
    if world.size > data.num_shards:
        _refuse(
            f"{world.size} ranks cannot divide the {data.num_shards} logical shards of a global batch: use fewer "
            "ranks, more shards in the stream, or a smaller micro_batch_size"
        )


def _refuse(reason: str) -> NoReturn:
    raise ConfigError(f"exact=True promises the same bits on any number of ranks, but {reason}")
