"""What a training would take: sizes and counts, found on the meta device and from the data's metadata."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from ..config import ParallelConfig, Precision
from ..data.protocols import BatchStream, HasDroppedTail
from ..distributed.parallelize import blocks_of
from ..distributed.world import World
from ..loop.context import RunContext


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """How large a model is, as a whole.

    Attributes:
        kind: its class.
        parameters, trainable: how many numbers, of which so many are trained.
        parameter_bytes, trainable_bytes, buffer_bytes: what they take once.
        block_bytes: of the largest of the blocks that are gathered one at a time; 0 without blocks.
        rest_bytes: of the parameters that are in no block.
    """

    kind: str
    parameters: int
    trainable: int
    parameter_bytes: int
    trainable_bytes: int
    buffer_bytes: int
    block_bytes: int
    rest_bytes: int

    @property
    def frozen(self) -> int:
        """How many numbers are not trained."""
        return self.parameters - self.trainable


@dataclass(frozen=True, kw_only=True)
class DataSize:
    """How much data one pass has.

    Attributes:
        samples, steps: over all ranks; None where the data cannot tell.
        dropped: samples that fill no global batch, and are left out of the pass.
        guarantee: what can be found again in it: see `BatchStream`.
        fingerprint: tells it from other data; None where nobody can without reading it.
    """

    samples: int | None
    steps: int | None
    dropped: int
    guarantee: str
    fingerprint: str | None


@dataclass(frozen=True, kw_only=True)
class MemoryPerRank:
    """What one rank holds for the whole training, in bytes. Activations come on top: they depend on the batch.

    Attributes:
        parameters, gradients, optimizer, buffers: this rank's part; `optimizer` is None where nobody can tell.
        gathered: what FSDP2 puts together from all ranks at one time: two blocks, and what is in no block.
        offloaded: whether the first three lie in the memory of the CPU.
    """

    parameters: int
    gradients: int
    optimizer: int | None
    buffers: int
    gathered: int
    offloaded: bool

    @property
    def total(self) -> int:
        """All of it that is known."""
        return self.parameters + self.gradients + (self.optimizer or 0) + self.buffers + self.gathered


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a training would take.

    Attributes:
        models: by name.
        optimizers: their classes, by name.
        optimizer_bytes: their state after the first step, as a whole; None where it cannot be found out.
        unknown: why not.
        train: the training data.
        validation: the sets of validation data, by name; the only one of a trainer has none.
        total_steps: updates of the whole run, where that is known.
        memory: of one rank.
    """

    models: dict[str, ModelSize]
    optimizers: dict[str, str]
    optimizer_bytes: int | None
    unknown: str
    train: DataSize
    validation: dict[str, DataSize]
    total_steps: int | None
    memory: MemoryPerRank

    @property
    def checkpoint_bytes(self) -> int | None:
        """About what one checkpoint takes: weights, buffers and the optimizers' state, once."""
        if self.optimizer_bytes is None:
            return None
        return self.optimizer_bytes + sum(each.parameter_bytes + each.buffer_bytes for each in self.models.values())


def estimate_of(
    ctx: RunContext,
    train: BatchStream,
    validation: Mapping[str, BatchStream],
    *,
    total_steps: int | None,
    unknown: str,
) -> Estimate:
    """Measures a training that has its models, data and optimizers, all of them shapes without values.

    Args:
        ctx: with models and optimizers.
        train: open.
        validation: open, by name.
        total_steps: updates of the whole run, where that is known.
        unknown: why there are no optimizers; empty if there are.
    """
    config = ctx.config
    models = {name: size_of(model, config.parallel, config.precision) for name, model in ctx.models.items()}
    optimizer_bytes: int | None = None
    if not unknown:
        try:
            optimizer_bytes = sum(state_bytes(each, config.precision) for each in ctx.optimizers.values())
        except Exception as error:
            unknown = f"its first step on the meta device raises {type(error).__name__}"
    return Estimate(
        models=models,
        optimizers={name: type(each).__name__ for name, each in ctx.optimizers.items()},
        optimizer_bytes=optimizer_bytes,
        unknown=unknown,
        train=_data_size(train),
        validation={name: _data_size(stream) for name, stream in validation.items()},
        total_steps=total_steps,
        memory=memory_per_rank(
            models, optimizer_bytes, config=config.parallel, precision=config.precision, world=ctx.world
        ),
    )


def size_of(model: nn.Module, config: ParallelConfig, precision: Precision) -> ModelSize:
    """Measures a model that is not wrapped yet, wherever its tensors lie, in the format in which it is kept."""

    def kept(tensors: Iterable[torch.Tensor]) -> int:
        return sum(each.numel() * _dtype(each, precision).itemsize for each in tensors)

    parameters = list(model.parameters())
    inside = [list(block.parameters()) for _, _, block in blocks_of(model, config)]
    in_blocks = {id(parameter) for block in inside for parameter in block}
    return ModelSize(
        kind=type(model).__name__,
        parameters=sum(each.numel() for each in parameters),
        trainable=sum(each.numel() for each in parameters if each.requires_grad),
        parameter_bytes=kept(parameters),
        trainable_bytes=kept(each for each in parameters if each.requires_grad),
        buffer_bytes=kept(model.buffers()),
        block_bytes=max((kept(block) for block in inside), default=0),
        rest_bytes=kept(each for each in parameters if id(each) not in in_blocks),
    )


def state_bytes(optimizer: Optimizer, precision: Precision) -> int:
    """Counts what the state of an optimizer takes after its first step, by making one on the meta device.

    The optimizer is left as it was. Raises whatever it raises on parameters without values.
    """
    groups, state = optimizer.param_groups, optimizer.state
    optimizer.state = defaultdict(dict)
    # Fused kernels are made for devices; what they keep is the same.
    optimizer.param_groups = [
        {**group, "params": [_shadow(each, precision) for each in group["params"] if each.requires_grad]}
        | ({"fused": False} if group.get("fused") else {})
        for group in groups
    ]
    try:
        optimizer.step()
        tensors = (value for each in optimizer.state.values() for value in each.values())
        return _bytes(value for value in tensors if isinstance(value, torch.Tensor))
    finally:
        optimizer.param_groups, optimizer.state = groups, state


def memory_per_rank(
    models: Mapping[str, ModelSize],
    optimizer_bytes: int | None,
    *,
    config: ParallelConfig,
    precision: Precision,
    world: World,
) -> MemoryPerRank:
    """Divides what all models and optimizers take by what the strategy makes of it on so many ranks."""
    sizes = list(models.values())
    shards = world.size > 1 and config.strategy in ("fsdp", "hsdp")
    parts = (config.shard_size or world.size) if shards else 1
    gathered = 0
    if shards:
        # The next block is gathered while one computes, in the format in which it computes.
        everything = sum(each.parameter_bytes for each in sizes)
        most = max(2 * each.block_bytes + each.rest_bytes for each in sizes)
        gathered = most if config.reshard_after_forward else everything
        gathered = gathered // 2 if precision in ("bf16", "fp16") else gathered
    return MemoryPerRank(
        parameters=_part(sum(each.parameter_bytes for each in sizes), parts),
        gradients=_part(sum(each.trainable_bytes for each in sizes), parts),
        optimizer=None if optimizer_bytes is None else _part(optimizer_bytes, parts),
        buffers=sum(each.buffer_bytes for each in sizes),
        gathered=gathered,
        offloaded=shards and config.cpu_offload,
    )


def _data_size(stream: BatchStream) -> DataSize:
    return DataSize(
        samples=stream.samples_in_epoch(0),
        steps=stream.steps_in_epoch(0),
        dropped=stream.dropped_in_epoch(0) if isinstance(stream, HasDroppedTail) else 0,
        guarantee=stream.guarantee,
        fingerprint=stream.fingerprint,
    )


def _shadow(parameter: nn.Parameter, precision: Precision) -> nn.Parameter:
    """A parameter of the same shape without memory, with a gradient, in the format in which it is kept."""
    shadow = nn.Parameter(torch.empty_like(parameter, device="meta", dtype=_dtype(parameter, precision)))
    shadow.grad = torch.empty_like(shadow)
    return shadow


def _dtype(tensor: torch.Tensor, precision: Precision) -> torch.dtype:
    return torch.bfloat16 if precision == "bf16-true" and tensor.is_floating_point() else tensor.dtype


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


def _part(amount: int, parts: int) -> int:
    return -(-amount // parts)
