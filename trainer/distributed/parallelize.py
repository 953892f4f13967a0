"""Parallelize a model: from the meta device to training on many ranks.

The order:

    created on meta -> transformed (on_models_configured) -> frozen -> float8 -> divided by layers (TP)
    -> checkpointed -> compiled -> sharded (FSDP2, HSDP) -> materialised -> initialised -> replicated (DDP)

Sharding comes before materialising, so no rank ever holds the whole model; replicating comes last, because DDP
broadcasts rank 0's weights. The order follows torchtitan's `parallelize_llama`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DistributedDataParallel

from ..config import ParallelConfig, Precision
from ..errors import ConfigError
from ..private_torch import compile_in_place, compiled_module
from ..step.precision import cast_weights
from .activation_checkpointing import wrap_checkpointed
from .ddp import ReplicatedModule, rebuild_buckets
from .dtensor import is_sharded, own_part, to_local
from .fsdp import callable_roots, has_forward, shard_fully, sharded_roots, whole_parameters
from .mesh import Mesh
from .mesh_sizes import MeshSizes
from .world import NOT_SENT_BY_GLOO, World

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def shard(model: nn.Module, config: ParallelConfig, *, precision: Precision, world: World, mesh: Mesh) -> None:
    """Prepare a model in place: all steps up to the initialisation of weights. Every rank must call this.

    Args:
        model: on the meta device; or with weights, if they are not to be sharded.
        config: settings of checkpointing, compilation and sharding.
        precision: "bf16" and "fp16" gather sharded parameters in that dtype, "bf16-true" stores them in it; their
            gradients are reduced in float32.
        world: all ranks.
        mesh: their arrangement. With tensor parallelism, layers are divided already.
    """
    if is_sharded(model) and mesh.tensor.size == 1:
        _materialise(model, world.device, world.device)
        return
    blocks = blocks_of(model, config)
    if config.activation_checkpointing != "none":
        for parent, name, block in blocks:
            parent.register_module(name, wrap_checkpointed(block, config.activation_checkpointing))
    blocks = [(parent, name, parent.get_submodule(name)) for parent, name, _ in blocks]
    if config.compile:
        for module in [block for _, _, block in blocks] or [model]:
            compile_in_place(module)
    if mesh.shard_mesh is not None:
        shard_fully(model, [block for _, _, block in blocks], config, precision, mesh.shard_mesh)
    offloads = mesh.shard_mesh is not None and config.cpu_offload
    _materialise(model, torch.device("cpu") if offloads else world.device, world.device)


def prepare_weights(models: Mapping[str, nn.Module], precision: Precision) -> None:
    """Check that each model has all its values or none, and cast them to the dtype in which they are stored.

    Raises:
        ConfigError: some tensors have values, which would be lost, while others are on the meta device.
    """
    for model in models.values():
        _check_all_on_meta_or_none(model)
        cast_weights(model, precision)


def replicate(model: nn.Module, config: ParallelConfig, world: World, *, gradients_are_kept: bool = False) -> nn.Module:
    """Wrap an initialised model in DDP if the strategy asks for it; return other models unchanged.

    Args:
        model: with weights.
        config: its strategy.
        world: the ranks whose gradients are averaged.
        gradients_are_kept: whether other code may keep gradients from one update to the next, or assign their `data`:
            then they are tensors of their own, for one more copy, and not views of the buffers that DDP reduces.

    Raises:
        ConfigError: gloo does not send a parameter or buffer of this dtype.
    """
    trains = any(parameter.requires_grad for parameter in model.parameters())
    if world.size == 1 or config.strategy != "ddp" or not trains or is_sharded(model):
        return model
    for buffer in model.buffers():
        if buffer.is_contiguous() and not buffer.is_sparse:
            # A transposed dimension of size 1 has an unusual stride, with which DDP cannot broadcast a single buffer.
            buffer.data = buffer.data.reshape(-1).view(buffer.shape)
    if "gloo" in dist.get_backend(world.group):
        # Before DDP broadcasts them: a rank may see gloo's error in a later collective.
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_cpu and tensor.dtype in NOT_SENT_BY_GLOO:
                raise ConfigError(
                    f"parallel.strategy='ddp' broadcasts weights, but gloo does not send {name!r} of dtype "
                    f"{tensor.dtype}: keep it in another dtype, such as int32 or bfloat16, or use "
                    "parallel.strategy='fsdp', which sends its bytes"
                )
    replicated = ReplicatedModule(
        model,
        process_group=world.group,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=not gradients_are_kept,
        find_unused_parameters=config.find_unused_parameters,
    )
    if world.size > 2:  # the sum of two is the same in any order
        rebuild_buckets(replicated)
    return replicated


def rewrap_ddp(model: nn.Module, config: ParallelConfig, world: World) -> nn.Module:
    """Wrap a DDP model again, for a new process group; return other models unchanged."""
    if not isinstance(model, DistributedDataParallel):
        return model
    return replicate(model.module, config, world, gradients_are_kept=not model.gradient_as_bucket_view)


def check_unsharded(model: nn.Module) -> None:
    """Check that a model can continue in another process group.

    Raises:
        ConfigError: the model is sharded over the ranks of a group that has ended.
    """
    if is_sharded(model):
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
    MeshSizes.of(config, world.size)
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


def check_modules(models: Mapping[str, nn.Module], config: ParallelConfig, world: World) -> None:
    """Check that models are not wrapped yet, contain the modules that the config names, and suit several ranks.

    Raises:
        ConfigError: a model is already wrapped, a module is missing (the message lists the existing ones), or a module
            does not work on several ranks or as a block.
    """
    for name, model in models.items():
        if isinstance(model, (DistributedDataParallel, nn.DataParallel)):
            kind = "DDP" if isinstance(model, DistributedDataParallel) else "DataParallel"
            raise ConfigError(
                f"{name} is already wrapped in {kind}: set the plain module in configure_models(); "
                "parallel.strategy='ddp' trains it on several GPUs, one rank each"
            )
        for path, module in model.named_modules():
            _check_module(f"{name}.{path}".rstrip("."), module, world)
        if compiled_module(model) is not None and config.strategy in ("fsdp", "hsdp"):
            raise ConfigError(
                f"{name} is already compiled, and a compiled module cannot be sharded: set the plain module in "
                "configure_models(); parallel.compile=True compiles it at the right point"
            )
    _check_blocks(models, config)


def _check_module(name: str, module: nn.Module, world: World) -> None:
    """Check a module of a model, without its submodules, see `check_modules`."""
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        raise ConfigError(
            f"{name} is a {type(module).__name__}, whose shape is unknown until a forward pass: create the module with "
            "its sizes, or call the model on a batch in configure_models()"
        )
    if world.size == 1:
        return
    if world.device.type == "cpu" and isinstance(module, nn.SyncBatchNorm):
        raise ConfigError(
            f"{name} is a SyncBatchNorm, which works on several ranks with GPUs only: leave out convert_sync_batchnorm "
            "on CPUs, where each rank then normalizes its own rows"
        )
    if getattr(module, "max_norm", None) is not None and isinstance(module, _EMBEDDINGS):
        raise ConfigError(
            f"{name} is an {type(module).__name__} with max_norm, which shrinks the rows that a rank looks up, and not "
            "the same rows of the other ranks: leave it out, and shrink all rows in on_step_end, or train on one rank"
        )


def _check_blocks(models: Mapping[str, nn.Module], config: ParallelConfig) -> None:
    """Check the modules that are gathered and checkpointed one at a time, see `check_modules`."""
    blocks = [block for model in models.values() for _, _, block in blocks_of(model, config)]
    if missing := set(config.shard_modules) - {type(block).__name__ for block in blocks}:
        inside = {
            type(each).__name__
            for model in models.values()
            for each in model.modules()
            if each is not model and has_forward(each)
        }
        raise ConfigError(
            f"parallel.shard_modules names {', '.join(sorted(missing))}, which {', '.join(models)} does not contain as "
            f"a module with forward(); it contains {', '.join(sorted(inside)) or 'no modules'}"
        )
    if config.strategy in ("fsdp", "hsdp"):
        for name, model in models.items():
            _check_roots(name, model)
            found = blocks_of(model, config)
            apart = {id(block) for _, _, block in _without_shared_weights(model, found)}
            for block in (block for _, _, block in found if id(block) not in apart):
                tied = next(
                    path for path, each in model.named_parameters() if any(each is p for p in block.parameters())
                )
                raise ConfigError(
                    f"parallel.shard_modules names {type(block).__name__}, but a {type(block).__name__} shares "
                    f"{name}.{tied} with another module, and a sharded weight belongs to one: leave it out"
                )
    if config.activation_checkpointing != "none":
        for module in (each for block in blocks for each in block.modules()):
            if getattr(module, "running_mean", None) is not None and module.training:
                raise ConfigError(
                    "parallel.activation_checkpointing computes each block twice, and would update the running means "
                    f"of {type(module).__name__} twice: leave it out, or use a norm without running means"
                )
    if config.activation_checkpointing != "none" and not blocks:
        raise ConfigError(
            "parallel.activation_checkpointing needs blocks to checkpoint, but there is no ModuleList in "
            f"{', '.join(models)}: name the blocks' classes in parallel.shard_modules"
        )


def _check_roots(name: str, model: nn.Module) -> None:
    """Raise for a module that only holds others, of which two share a weight: each would be sharded by itself."""
    owners: dict[nn.Parameter, nn.Module] = {}
    for root in callable_roots(model):
        for parameter in root.parameters():
            if owners.setdefault(parameter, root) is not root:
                shared = next(path for path, each in model.named_parameters() if each is parameter)
                raise ConfigError(
                    f"{name}.{shared} is a weight of two modules that are called by themselves, since {name}, a "
                    f"{type(model).__name__}, has no forward(), and a sharded weight belongs to one: give {name} a "
                    "forward() or methods that call them, or use parallel.strategy='ddp'"
                )


def without_gradient_sync(
    models: Mapping[str, nn.Module], *, no_sync: bool | None, must_reach_parameters: bool
) -> AbstractContextManager[object]:
    """Put off gradient reduction inside the context, for all but the last micro-batch of an update.

    Args:
        models: the models being trained.
        no_sync: as in `ParallelConfig`. If None, sharded gradients are reduced in every micro-batch, as in torchtitan:
            a rank would otherwise hold the whole gradient.
        must_reach_parameters: whether sharded parameters must get their `grad` in every micro-batch.
    """
    stack = ExitStack()
    for model in models.values():
        if isinstance(model, DistributedDataParallel) and no_sync is not False:
            stack.enter_context(model.no_sync())
        elif no_sync is not False and not must_reach_parameters:
            for root in sharded_roots(model):
                put_off = root.set_requires_gradient_sync if no_sync else root.set_requires_all_reduce
                put_off(False)
                stack.callback(put_off, True)
    return stack


def blocks_of(model: nn.Module, config: ParallelConfig) -> list[tuple[nn.Module, str, nn.Module]]:
    """Return the modules to checkpoint, compile and shard individually, outermost first, as (parent, name, module).

    Those that `shard_modules` names; or the layers that a Hugging Face model names in `_no_split_modules`; or the
    elements of every `ModuleList`, of a `ModuleDict` without lists in it, and of a `Sequential` that repeats a module
    with submodules. Never a container without `forward`; and unless the user names them, none without parameters, and
    none that shares a weight with another module, because a weight belongs to a single unit. Empty if nothing fits: the
    model is then one unit.
    """
    wanted = set(config.shard_modules)
    if not wanted:
        # Their ModuleLists may hold smaller modules, such as experts.
        layers = set(getattr(model, "_no_split_modules", None) or ())
        wanted = layers & {type(module).__name__ for module in model.modules()}
    repeated = set() if wanted else _repeated_in_sequentials(model)

    def is_block(parent: nn.Module, child: nn.Module) -> bool:
        if wanted:
            return type(child).__name__ in wanted
        if not any(True for _ in child.parameters()):
            return False
        if isinstance(parent, nn.ModuleDict):
            return not any(isinstance(each, (nn.ModuleList, nn.ModuleDict)) for each in parent.children())
        return isinstance(parent, nn.ModuleList) or (isinstance(parent, nn.Sequential) and type(child) in repeated)

    found = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in parent.named_children()
        if is_block(parent, child) and has_forward(child)
    ]
    return found if config.shard_modules else _without_shared_weights(model, found)


def _repeated_in_sequentials(model: nn.Module) -> set[type[nn.Module]]:
    """Return the classes with submodules that occur twice in one `Sequential`, such as the blocks of a ResNet."""
    found: set[type[nn.Module]] = set()
    for module in model.modules():
        if isinstance(module, nn.Sequential):
            classes = Counter(type(child) for child in module if any(True for _ in child.children()))
            found.update(cls for cls, count in classes.items() if count > 1 and cls is not nn.Sequential)
    return found


def _without_shared_weights(
    model: nn.Module, blocks: list[tuple[nn.Module, str, nn.Module]]
) -> list[tuple[nn.Module, str, nn.Module]]:
    """Drop blocks with a weight that a module outside of them has, too."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(module)
    shared = {parameter: set(modules) for parameter, modules in owners.items() if len(modules) > 1}
    if not shared:
        return blocks
    return [
        (parent, name, block)
        for parent, name, block in blocks
        if all(shared.get(each, set()) <= set(block.modules()) for each in block.parameters())
    ]


def _materialise(model: nn.Module, parameters_on: torch.device, buffers_on: torch.device) -> None:
    if on_meta(model):
        _keeping_ties(model, lambda: model.to_empty(device=parameters_on))
    else:
        model.to(parameters_on)
    if parameters_on != buffers_on:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(buffers_on))
        for parameter in whole_parameters(model):
            parameter.data = parameter.data.to(buffers_on)


def allocate(model: nn.Module) -> None:
    """Move modules from the meta device to the CPU, without values."""

    def move() -> None:
        for module in model.modules():
            own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
            if own and all(tensor.is_meta for tensor in own):
                module.to_empty(device="cpu", recurse=False)

    if on_meta(model):
        _keeping_ties(model, move)


def drop_values(models: Mapping[str, nn.Module]) -> list[torch.Tensor]:
    """Move models to the meta device, and return the values of their tensors for `fill_from_main`."""
    values = [tensor.detach() for _, tensor in named_tensors(models)]
    for model in models.values():
        _keeping_ties(model, lambda model=model: model.to("meta"))  # type: ignore[misc]
    return values


def fill_from_main(models: Mapping[str, nn.Module], values: Sequence[torch.Tensor], world: World) -> None:
    """Copy the main rank's values into models, sharded or not, tensor by tensor. Every rank must call this.

    Args:
        models: materialized.
        values: of the whole tensors, on the main rank, from `drop_values`.
        world: all ranks.
    """
    with torch.no_grad():
        for number, (_, tensor) in enumerate(named_tensors(models)):
            if world.is_main:
                whole = values[number].to(world.device).contiguous()
            else:
                whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=world.device)
            world.broadcast_tensor(whole)
            to_local(tensor).copy_(whole[own_part(tensor)] if isinstance(tensor, DTensor) else whole)


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
            'but the rest is on the meta device: remove torch.device("meta") from on_models_configured, where new '
            "modules are created as the models are"
        )


def _keeping_ties(model: nn.Module, move: Callable[[], object]) -> None:
    """Move a model from or to the meta device, where each module gets a separate tensor; shared ones stay shared."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        own = module.named_parameters(recurse=False, remove_duplicate=False)
        buffers = module.named_buffers(recurse=False, remove_duplicate=False)
        for name, tensor in (*own, *buffers):
            places.setdefault(id(tensor), []).append((module, name))
    move()
    for (first, its_name), *others in places.values():
        for module, name in others:
            if its_name in first._parameters:
                module.register_parameter(name, first.get_parameter(its_name))
            else:
                setattr(module, name, first.get_buffer(its_name))


def on_meta(model: nn.Module) -> bool:
    """Whether any parameter or buffer of a model is on the meta device."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def in_same_memory(models: Mapping[str, nn.Module]) -> tuple[str, str] | None:
    """Return the names of two different parameters or buffers that have an element in common, if there are any."""
    of_storages: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in named_tensors(models):
        if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided and tensor.numel():
            others = of_storages.setdefault(id(tensor.untyped_storage()), [])
            for other, its_tensor in others:
                if its_tensor is not tensor and _overlap(its_tensor, tensor):
                    return other, name
            others.append((name, tensor))
    return None


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors in the same storage have an element in common."""
    if one.dtype == other.dtype and (_end(one) <= other.storage_offset() or _end(other) <= one.storage_offset()):
        return False  # as the slices of one flat tensor, of which there may be many
    is_in_one = torch.zeros(one.untyped_storage().nbytes() // one.itemsize, dtype=torch.bool, device="cpu")
    is_in_one.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return one.dtype != other.dtype or bool(
        is_in_one.as_strided(other.shape, other.stride(), other.storage_offset()).any()
    )


def _end(tensor: torch.Tensor) -> int:
    """Return where a tensor ends in its storage, in elements."""
    spans = zip(tensor.shape, tensor.stride(), strict=True)
    return int(tensor.storage_offset()) + 1 + sum((size - 1) * stride for size, stride in spans)


def named_tensors(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of some models by their names in checkpoints."""
    for name, model in models.items():
        for path, parameter in model.named_parameters(name):
            yield path, parameter
        for path, buffer in model.named_buffers(name):
            yield path, buffer
