"""From a model on the meta device to one that trains on many ranks.

The order, stated once:

    born on meta -> transformed (on_models_configured) -> frozen -> float8 -> checkpointed -> compiled
    -> sharded (FSDP2, HSDP) -> materialised -> initialised -> replicated (DDP)

Sharding comes before materialising, so no rank ever holds the whole model; replicating comes last, because DDP copies
the main rank's weights to the others. What torchtitan does in `parallelize_llama` is the model for this order.
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
    """Prepares a model in place up to the point where its weights are to be initialised. Every rank must call this.

    Args:
        model: on the meta device, or with real weights, which then are the main rank's on every rank.
        config: what to do with it.
        precision: "bf16" and "fp16" gather sharded parameters in that format, "bf16-true" keeps them in it; their
            gradients are reduced in float32.
        world: the ranks to spread it over.

    Raises:
        ConfigError: the strategy does not fit the number of ranks; or only a part of the model has values, which
            materialising the rest would lose.
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
    """Wraps an initialised model in DDP where the strategy asks for it, and otherwise returns it as it is."""
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
    """Wraps a model for the process group that follows the one in which it was replicated."""
    return replicate(model.module, config, world) if isinstance(model, DistributedDataParallel) else model


def check_unsharded(model: nn.Module) -> None:
    """Refuses a sharded model whose process group has ended.

    Raises:
        ConfigError: its shards belong to the ranks of that group.
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ConfigError(
            "fit has ended the process group that it began, and a sharded model cannot go on in another. Give the "
            "trainer a world that outlives fit: `with World.from_environment() as world: trainer = ...(world=world)`"
        )


def check_no_partial_gradients(model: nn.Module) -> None:
    """Refuses a sharded model that an error may have left in the midst of an update.

    Raises:
        ConfigError: FSDP2 keeps what it has of that update's gradients, and has no way to drop it.
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ConfigError(
            "an error has ended the fit before, and a sharded model may still hold gradients of the update that it "
            "broke: make a new trainer with the same run_dir, which goes on from the newest checkpoint"
        )


def check_strategy(config: ParallelConfig, world: World) -> None:
    """Refuses a strategy that does not fit the number of ranks.

    Raises:
        ConfigError: with the ranks there are and what would fit.
    """
    if config.strategy == "none" and world.size > 1:
        raise ConfigError(
            f"strategy 'none' trains in one process, and there are {world.size} ranks: take 'ddp' or 'fsdp'"
        )
    if config.strategy == "hsdp" and world.size > 1 and world.size % (config.shard_size or 1):
        raise ConfigError(
            f"strategy 'hsdp' with shard_size={config.shard_size} does not divide {world.size} ranks evenly"
        )
    if config.cpu_offload and world.device.type != "cpu" and world.size == 1:
        raise ConfigError(
            "cpu_offload moves the shards of FSDP2, and with one rank there are none: train on 2 ranks or more, or "
            "leave it out"
        )
    if config.cpu_offload and world.device.type != "cpu" and world.size > 1 and not world.supports_cpu_tensors:
        raise ConfigError(
            "cpu_offload adds up on the CPU too, and the process group that was set up before reaches the devices "
            'only: begin it with the backend "cpu:gloo,cuda:nccl"'
        )


def check_modules(models: Mapping[str, nn.Module], config: ParallelConfig) -> None:
    """Refuses models that are wrapped already, and a config whose blocks are in none of them.

    Raises:
        ConfigError: with what there is.
    """
    for name, model in models.items():
        if isinstance(model, DistributedDataParallel):
            raise ConfigError(
                f"{name} is wrapped in DDP already: set the bare module in configure_models(); "
                "config.parallel.strategy='ddp' wraps it"
            )
        if isinstance(model, torch._dynamo.OptimizedModule) and config.strategy in ("fsdp", "hsdp"):
            raise ConfigError(
                f"{name} is compiled already, and what is compiled cannot be sharded: set the bare module in "
                "configure_models(); config.parallel.compile=True compiles it in the right order"
            )
    blocks = [block for model in models.values() for _, _, block in blocks_of(model, config)]
    if missing := set(config.shard_modules) - {type(block).__name__ for block in blocks}:
        inside = {type(each).__name__ for model in models.values() for each in model.modules() if each is not model}
        raise ConfigError(
            f"config.parallel.shard_modules names {', '.join(sorted(missing))}, and there is none inside "
            f"{', '.join(models)}; there is {', '.join(sorted(inside)) or 'nothing'}"
        )
    if config.activation_checkpointing != "none" and not blocks:
        raise ConfigError(
            f"activation checkpointing needs blocks to checkpoint, and there is no ModuleList in {', '.join(models)}: "
            "name the blocks' classes in config.parallel.shard_modules"
        )


def without_gradient_sync(
    models: Mapping[str, nn.Module], *, also_sharded: bool = True
) -> AbstractContextManager[object]:
    """Keeps the gradients of a pass on this rank: for all micro-batches of an update but the last.

    Args:
        models: those that train.
        also_sharded: False has sharded gradients meet all the same, without which parameters have no `grad`.
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
    """The modules that are treated one at a time, outermost first, each with its parent and its name there."""
    wanted = set(config.shard_modules)
    if not wanted:
        # Hugging Face's models name their layers themselves; their lists may hold smaller things, such as experts.
        of_its_own = set(getattr(model, "_no_split_modules", None) or ())
        wanted = of_its_own & {type(module).__name__ for module in model.modules()}
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
    # Pinned memory is what a GPU copies from without waiting; without a GPU there is none.
    offload = CPUOffloadPolicy(pin_memory=kind == "cuda") if config.cpu_offload else OffloadPolicy()
    # Innermost first: what a nested block has taken, its parent leaves alone.
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
    """Gives every rank the main rank's weights and buffers. Every rank must call this."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.copy_(world.broadcast_tensor(tensor.to(world.device, copy=True)))


def _check_all_on_meta_or_none(model: nn.Module) -> None:
    tensors = dict(named_tensors({"model": model}))
    born = [name.removeprefix("model.") for name, tensor in tensors.items() if not tensor.is_meta]
    if born and len(born) < len(tensors):
        raise ConfigError(
            f"{', '.join(born[:8])}{' and more' if len(born) > 8 else ''} of {type(model).__name__} came with values, "
            "and the rest is on the meta device, where configure_models runs: set the values in init_weights(), or "
            'make the whole model with values, under torch.device("cpu")'
        )


def _materialise_tied(model: nn.Module, device: torch.device) -> None:
    """Materialises a model, with tied weights still tied: `to_empty` gives each place a tensor of its own."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((module, name))
    model.to_empty(device=device)
    for (first, its_name), *others in places.values():
        for module, name in others:
            module.register_parameter(name, first.get_parameter(its_name))


def on_meta(model: nn.Module) -> bool:
    """Whether any of a model's tensors has no memory yet."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def named_tensors(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the parameters and buffers of some models, with their names as checkpoints have them."""
    for name, model in models.items():
        for path, parameter in model.named_parameters(name):
            yield path, parameter
        for path, buffer in model.named_buffers(name):
            yield path, buffer
