"""Parallelize a model: from the meta device to training on many ranks.

The order:

    created on meta -> transformed (on_models_configured) -> frozen -> float8 -> checkpointed -> compiled
    -> sharded (FSDP2, HSDP) -> materialised -> initialised -> replicated (DDP)

Sharding comes before materialising, so no rank ever holds the whole model; replicating comes last, because DDP
broadcasts rank 0's weights. The order follows torchtitan's `parallelize_llama`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from ..config import ParallelConfig, Precision
from ..errors import ConfigError
from ..step.precision import cast_weights
from .activation_checkpointing import wrap_checkpointed
from .dtensor import is_sharded
from .world import World, set_group_timeout


def shard(model: nn.Module, config: ParallelConfig, *, precision: Precision, world: World) -> None:
    """Prepare a model in place: all steps up to the initialisation of weights. Every rank must call this.

    Args:
        model: on the meta device, or with weights, in which case all ranks get rank 0's.
        config: settings of checkpointing, compilation and sharding.
        precision: "bf16" and "fp16" gather sharded parameters in that dtype, "bf16-true" stores them in it; their
            gradients are reduced in float32.
        world: the ranks to shard over.

    Raises:
        ConfigError: the strategy does not fit the number of ranks; or some tensors have values, which would be
            lost, while others are on the meta device.
    """
    check_strategy(config, world)
    _check_all_on_meta_or_none(model)
    cast_weights(model, precision)
    if is_sharded(model):
        _materialise(model, world.device, world.device)
        return
    blocks = blocks_of(model, config)
    if config.activation_checkpointing != "none":
        for parent, name, block in blocks:
            parent.register_module(name, wrap_checkpointed(block, config.activation_checkpointing))
    blocks = [(parent, name, parent.get_submodule(name)) for parent, name, _ in blocks]
    if config.compile:
        for module in [block for _, _, block in blocks] or [model]:
            module.compile()
    shards = world.size > 1 and config.strategy in ("fsdp", "hsdp")
    if shards:
        if not on_meta(model):
            broadcast_weights(model, world)
        _fully_shard(model, [block for _, _, block in blocks], config, precision, world)
    offloads = shards and config.cpu_offload
    _materialise(model, torch.device("cpu") if offloads else world.device, world.device)


def replicate(model: nn.Module, config: ParallelConfig, world: World) -> nn.Module:
    """Wrap an initialised model in DDP if the strategy asks for it; return other models unchanged."""
    trains = any(parameter.requires_grad for parameter in model.parameters())
    if world.size == 1 or config.strategy != "ddp" or not trains or is_sharded(model):
        return model
    return DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        find_unused_parameters=config.find_unused_parameters,
    )


def rewrap_ddp(model: nn.Module, config: ParallelConfig, world: World) -> nn.Module:
    """Wrap a DDP model again, for a new process group; return other models unchanged."""
    return replicate(model.module, config, world) if isinstance(model, DistributedDataParallel) else model


def check_unsharded(model: nn.Module) -> None:
    """Check that a model can continue in another process group.

    Raises:
        ConfigError: the model is sharded over the ranks of a group that has ended.
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ConfigError(
            "fit() has ended the process group that it started, and a sharded model cannot move to another. Pass the "
            "trainer a world that outlives fit: `with World.from_environment() as world: trainer = ...(world=world)`"
        )


def check_no_partial_gradients(model: nn.Module) -> None:
    """Check that a model holds no gradients of an update that failed.

    Raises:
        ConfigError: the model is sharded: FSDP2 keeps partial gradients and offers no way to drop them.
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ConfigError(
            "the previous fit() failed, and a sharded model may still hold gradients of the interrupted update: create "
            "a new Trainer with the same run_dir, which resumes from the newest checkpoint"
        )


def check_strategy(config: ParallelConfig, world: World) -> None:
    """Check that the strategy fits the number of ranks.

    Raises:
        ConfigError: the strategy does not fit.
    """
    if config.strategy == "none" and world.size > 1:
        raise ConfigError(
            f"parallel.strategy='none' trains in one process, but there are {world.size} ranks: use 'ddp' or 'fsdp'"
        )
    if config.strategy == "hsdp" and world.size > 1 and world.size % (config.shard_size or 1):
        raise ConfigError(
            f"parallel.shard_size={config.shard_size} (strategy 'hsdp') must divide the number of ranks, {world.size}"
        )
    if config.cpu_offload and world.device.type != "cpu" and world.size == 1:
        raise ConfigError(
            "parallel.cpu_offload moves FSDP2's shards to the CPU, but a single rank has none: use at least 2 ranks, "
            "or remove cpu_offload"
        )
    if config.cpu_offload and world.device.type != "cpu" and world.size > 1 and not world.supports_cpu_tensors:
        raise ConfigError(
            "parallel.cpu_offload reduces gradients on the CPU, which the existing process group does not support: "
            'start it with the backend "cpu:gloo,cuda:nccl"'
        )


def check_modules(models: Mapping[str, nn.Module], config: ParallelConfig) -> None:
    """Check that models are not wrapped yet, and that they contain the modules that the config names.

    Raises:
        ConfigError: a model is already wrapped, or a module is missing; the message lists the existing ones.
    """
    for name, model in models.items():
        if isinstance(model, DistributedDataParallel):
            raise ConfigError(
                f"{name} is already wrapped in DDP: set the plain module in configure_models(); "
                "parallel.strategy='ddp' wraps it"
            )
        if isinstance(model, torch._dynamo.OptimizedModule) and config.strategy in ("fsdp", "hsdp"):
            raise ConfigError(
                f"{name} is already compiled, and a compiled module cannot be sharded: set the plain module in "
                "configure_models(); parallel.compile=True compiles it at the right point"
            )
    blocks = [block for model in models.values() for _, _, block in blocks_of(model, config)]
    if missing := set(config.shard_modules) - {type(block).__name__ for block in blocks}:
        inside = {type(each).__name__ for model in models.values() for each in model.modules() if each is not model}
        raise ConfigError(
            f"parallel.shard_modules names {', '.join(sorted(missing))}, which {', '.join(models)} does not contain; "
            f"it contains {', '.join(sorted(inside)) or 'no modules'}"
        )
    if config.activation_checkpointing != "none" and not blocks:
        raise ConfigError(
            "parallel.activation_checkpointing needs blocks to checkpoint, but there is no ModuleList in "
            f"{', '.join(models)}: name the blocks' classes in parallel.shard_modules"
        )


def without_gradient_sync(
    models: Mapping[str, nn.Module], *, also_sharded: bool = True
) -> AbstractContextManager[object]:
    """Skip gradient reduction inside the context, for all but the last micro-batch of an update.

    Args:
        models: the models being trained.
        also_sharded: whether to skip sharded gradients too; sharded parameters then get no `grad`.
    """
    stack = ExitStack()
    for model in models.values():
        if isinstance(model, DistributedDataParallel):
            stack.enter_context(model.no_sync())
        elif isinstance(model, FSDPModule) and also_sharded:
            model.set_requires_gradient_sync(False)
            stack.callback(model.set_requires_gradient_sync, True)
    return stack


def blocks_of(model: nn.Module, config: ParallelConfig) -> list[tuple[nn.Module, str, nn.Module]]:
    """Return the modules to checkpoint, compile and shard individually, outermost first, as (parent, name, module)."""
    wanted = set(config.shard_modules)
    if not wanted:
        # Hugging Face's models name their layers; their ModuleLists may hold smaller modules, such as experts.
        layers = set(getattr(model, "_no_split_modules", None) or ())
        wanted = layers & {type(module).__name__ for module in model.modules()}
    found: list[tuple[nn.Module, str, nn.Module]] = []
    for parent in list(model.modules()):
        in_list = isinstance(parent, (nn.ModuleList, nn.ModuleDict))
        for name, child in parent.named_children():
            if type(child).__name__ in wanted or (not wanted and in_list):
                found.append((parent, name, child))
    return found


def _fully_shard(
    model: nn.Module, blocks: list[nn.Module], config: ParallelConfig, precision: Precision, world: World
) -> None:
    kind = world.device.type
    if config.strategy == "hsdp":
        assert config.shard_size is not None
        shape = (world.size // config.shard_size, config.shard_size)
        mesh = init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))
        for group in mesh.get_all_groups():
            set_group_timeout(group, config.timeout.amount)
    else:
        mesh = init_device_mesh(kind, (world.size,), mesh_dim_names=("shard",))
    policy = MixedPrecisionPolicy(
        param_dtype={"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision),
        reduce_dtype=None if precision == "fp32" else torch.float32,
    )
    # Pinned memory is for asynchronous copies to a GPU, and needs one.
    offload = CPUOffloadPolicy(pin_memory=kind == "cuda") if config.cpu_offload else OffloadPolicy()
    # Innermost first: fully_shard skips the parameters of modules that are already sharded.
    for module in reversed(blocks):
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=config.reshard_after_forward,
        )
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload)


def _materialise(model: nn.Module, parameters_on: torch.device, buffers_on: torch.device) -> None:
    if on_meta(model):
        _materialise_tied(model, parameters_on)
    else:
        model.to(parameters_on)
    if parameters_on != buffers_on:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(buffers_on))


def broadcast_weights(model: nn.Module, world: World) -> None:
    """Broadcast rank 0's weights and buffers to every rank. Every rank must call this."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.copy_(world.broadcast_tensor(tensor.to(world.device, copy=True)))


def _check_all_on_meta_or_none(model: nn.Module) -> None:
    tensors = dict(named_tensors({"model": model}))
    real = [name.removeprefix("model.") for name, tensor in tensors.items() if not tensor.is_meta]
    if real and len(real) < len(tensors):
        raise ConfigError(
            f"{', '.join(real[:8])}{' and more' if len(real) > 8 else ''} of {type(model).__name__} came with values, "
            "but the rest is on the meta device, where configure_models runs: set the values in init_weights(), or "
            'create the whole model with values, under torch.device("cpu")'
        )


def _materialise_tied(model: nn.Module, device: torch.device) -> None:
    """Materialise a model and keep tied weights tied: `to_empty` gives each module a separate tensor."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((module, name))
    model.to_empty(device=device)
    for (first, its_name), *others in places.values():
        for module, name in others:
            module.register_parameter(name, first.get_parameter(its_name))


def on_meta(model: nn.Module) -> bool:
    """Whether any parameter or buffer of a model is on the meta device."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def named_tensors(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of some models by their names in checkpoints."""
    for name, model in models.items():
        for path, parameter in model.named_parameters(name):
            yield path, parameter
        for path, buffer in model.named_buffers(name):
            yield path, buffer
