"""Opens the training and validation data."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader

from ..data.protocols import BatchStream, ShardInfo, is_stream
from ..data.streams import as_stream
from ..distributed.world import World
from ..errors import ConfigError
from ..exact.numerics import Numerics
from ..loop.context import RunContext
from .program import Program
from .rank_consistency import check_agreement


def open_data(program: Program, ctx: RunContext, numerics: Numerics) -> tuple[BatchStream, dict[str, BatchStream]]:
    """Open the training data and the sets of validation data by name.

    Raises:
        ConfigError, DataError: the data has an unsupported type, is empty, or does not fit the batch sizes.
    """
    loaders = program.configure_dataloaders()
    if loaders is None:
        loaders = getattr(program, "train_dataloader", None), getattr(program, "val_dataloader", None)
    train, validation = _train_and_validation(loaders)
    data = _open(ctx, numerics, train, training=True, in_use=())
    sets = {} if validation is None else open_sets(ctx, numerics, validation, in_use=[data])
    numerics.check_data(data, sets, ctx.world)
    return data, sets


def _train_and_validation(loaders: Any) -> tuple[Any, Any]:
    """Return what `configure_dataloaders` returned as training and validation data.

    Raises:
        ConfigError: it returned several loaders that are not a pair.
    """
    if not isinstance(loaders, (tuple, list, Mapping)):
        return loaders, None
    values = loaders.values() if isinstance(loaders, Mapping) else loaders
    num_loaders = sum(isinstance(each, DataLoader) or is_stream(each) for each in values)
    if num_loaders and (isinstance(loaders, Mapping) or len(loaders) != 2):
        raise ConfigError(
            f"configure_dataloaders() returned a {type(loaders).__name__} of {len(loaders)}: return (train, "
            'validation); several validation sets are a dict, (train, {"validation": ..., "test": ...}), and '
            "trainer.evaluate(test) reads others after training. Train on several sets together by one DataLoader "
            "over a torch.utils.data.StackDataset(a=..., b=...) or ConcatDataset"
        )
    if isinstance(loaders, tuple) and len(loaders) == 2 or num_loaders == 2:
        train, validation = loaders
        return train, validation
    return loaders, None


def open_sets(
    ctx: RunContext, numerics: Numerics, data: Any, *, in_use: Sequence[BatchStream]
) -> dict[str, BatchStream]:
    """Open validation data: one set, named "", or several by name. Streams in `in_use` are copied.

    Raises:
        ConfigError, DataError: the data has an unsupported type, is empty, or has an invalid name.
    """
    sets = data if isinstance(data, Mapping) else {"": data}
    if not all(isinstance(name, str) and (name or sets is not data) for name in sets):
        raise ConfigError(f"names of validation sets must be non-empty text, got {', '.join(map(repr, sets))}")
    return {
        name: _open(ctx, numerics, each, training=False, in_use=in_use)
        for name, each in sets.items()
        if each is not None
    }


def _open(
    ctx: RunContext, numerics: Numerics, data: Any, *, training: bool, in_use: Sequence[BatchStream]
) -> BatchStream:
    config = ctx.config
    stream = as_stream(data)
    if any(stream is each for each in in_use):
        # Opening the same stream again, for evaluation, would change it for training.
        stream = copy.copy(stream)
    stream.setup(
        ShardInfo(
            rank=ctx.mesh.data.rank,
            world_size=ctx.mesh.data.size,
            global_batch_size=config.global_batch_size,
            micro_batch_size=config.micro_batch_size,
            accumulation=config.gradient_accumulation_steps,
            seed=config.seed,
            device=ctx.device,
            training=training,
            by_shard=numerics.cuts_by_shard,
        )
    )
    return stream


def check_same_data(world: World, streams: Sequence[BatchStream]) -> None:
    """Check that all ranks have opened the same data. Every rank must call this.

    Iterables may have different lengths on each rank.

    Raises:
        ConfigError: the data differs.
    """
    facts = [
        (each.guarantee, each.fingerprint, each.steps_in_epoch(0) if each.guarantee == "exact" else None)
        for each in streams
    ]
    check_agreement(world, {"data": facts})
