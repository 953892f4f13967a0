"""Estimates of model size, data size and memory, from the meta device and the data's metadata."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from ..config import ParallelConfig, Precision
from ..data.protocols import BatchStream, HasDroppedTail
from ..distributed.mesh_sizes import MeshSizes
from ..distributed.parallelize import blocks_of
from ..distributed.world import World
from ..loop.context import RunContext


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The size of a whole model.

    Attributes:
        kind: its class name.
        parameters, trainable: number of elements of all parameters, and of those that are trained.
        parameter_bytes, trainable_bytes, buffer_bytes: their size, unsharded.
        blocks: number of blocks that are gathered, checkpointed and compiled one at a time; 0: the model is one unit.
        block_bytes: size of the largest block; 0 without blocks.
        rest_bytes: size of the parameters outside of blocks.
    """

    kind: str
    parameters: int
    trainable: int
    parameter_bytes: int
    trainable_bytes: int
    buffer_bytes: int
    blocks: int
    block_bytes: int
    rest_bytes: int

    @property
    def frozen(self) -> int:
        """Number of elements that are not trained."""
        return self.parameters - self.trainable


@dataclass(frozen=True, kw_only=True)
class DataSize:
    """The size of one pass over the data.

    Attributes:
        samples, steps: over all ranks; None if unknown.
        dropped: samples that do not fill a global batch, and are left out of the pass.
        micro_batch_size: maximum samples in one forward pass of one rank; None if only its part of the update limits
            them, or unknown.
        guarantee: how exactly a resumed run finds its position: see `BatchStream`.
        fingerprint: identifies the data; None if that would require reading it.
    """

    samples: int | None
    steps: int | None
    dropped: int
    micro_batch_size: int | None
    guarantee: str
    fingerprint: str | None


@dataclass(frozen=True, kw_only=True)
class MemoryPerRank:
    """Memory of one rank in bytes, without activations, which depend on the batch.

    Attributes:
        parameters, gradients, optimizer, buffers: this rank's part; `optimizer` is None if unknown.
        gathered: parameters that FSDP2 gathers at a time: two blocks, and those outside of blocks.
        offloaded: whether the first three are in CPU memory.
    """

    parameters: int
    gradients: int
    optimizer: int | None
    buffers: int
    gathered: int
    offloaded: bool

    @property
    def total(self) -> int:
        """Sum of all known parts."""
        return self.parameters + self.gradients + (self.optimizer or 0) + self.buffers + self.gathered


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The estimated size of a training run.

    Attributes:
        models: by name.
        optimizers: their class names, by name.
        optimizer_bytes: size of their state after the first step, unsharded; None if unknown.
        unknown: why it is unknown; empty if it is not.
        train: the training data.
        validation: the sets of validation data, by name; a single unnamed set has the key "".
        total_steps: updates of the whole run; None if unknown.
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
        """Approximate size of a checkpoint: weights, buffers and optimizer state, unsharded."""
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
    """Estimate a run whose models, data and optimizers exist on the meta device.

    Args:
        ctx: with models and optimizers.
        train: the open training data.
        validation: the open validation sets, by name.
        total_steps: updates of the whole run; None if unknown.
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
    """Return the size of a model that is not wrapped yet, on any device, with the dtypes of the precision."""

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
        buffer_bytes=sum(each.nbytes for each in model.buffers()),
        blocks=len(inside),
        block_bytes=max((kept(block) for block in inside), default=0),
        rest_bytes=kept(each for each in parameters if id(each) not in in_blocks),
    )


def state_bytes(optimizer: Optimizer, precision: Precision) -> int:
    """Return the size of an optimizer's state after its first step, by taking one on the meta device.

    The optimizer does not change. Raises any error that it raises for parameters without values.
    """
    groups, state = optimizer.param_groups, optimizer.state
    optimizer.state = defaultdict(dict)
    # Fused kernels do not run on the meta device; their state has the same size.
    optimizer.param_groups = [
        {**group, "params": [_shadow(each, precision) for each in group["params"] if each.requires_grad]}
        | ({"fused": False} if group.get("fused") else {})
        for group in groups
    ]
    try:
        optimizer.step()
        tensors = (value for each in optimizer.state.values() if isinstance(each, dict) for value in each.values())
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
    """Return the memory of one rank, given the strategy and the number of ranks."""
    sizes = list(models.values())
    shards = world.size > 1 and config.strategy in ("fsdp", "hsdp")
    mesh = MeshSizes.of(config, world.size)
    # Layers that tensor parallelism divides count as whole: the plan needs the ranks.
    parts = mesh.dp_shard * mesh.cp if shards else 1
    gathered = 0
    if shards:
        # The next block is gathered during the computation of one, in the dtype of the computation.
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
        micro_batch_size=getattr(stream, "micro_batch_size", None),
        guarantee=stream.guarantee,
        fingerprint=stream.fingerprint,
    )


def _shadow(parameter: nn.Parameter, precision: Precision) -> nn.Parameter:
    """Return a meta parameter of the same shape, with a gradient, in the dtype of the precision."""
    shadow = nn.Parameter(torch.empty_like(parameter, device="meta", dtype=_dtype(parameter, precision)))
    shadow.grad = torch.empty_like(shadow)
    return shadow


def _dtype(tensor: torch.Tensor, precision: Precision) -> torch.dtype:
    return torch.bfloat16 if precision == "bf16-true" and tensor.is_floating_point() else tensor.dtype


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


def _part(amount: int, parts: int) -> int:
    return -(-amount // parts)
