"""FSDP2: sharding of a model, and methods of a sharded model that use its weights."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from ..config import ParallelConfig, Precision
from ..errors import ConfigError, StepError
from ..private_torch import function_of
from .ddp import COPIED
from .world import NOT_SENT_BY_GLOO, World

_CHANGE_NO_VALUES = ("requires_grad_", "share_memory_")
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_IN_OPTIMIZER = ".step(), whose parameters, gradients and state are shards (DTensor) under FSDP2"
_FRAMES_OF_A_CALL = 10  # from a hook of a module to what has called the module
_DATA_ASSIGNED = (
    "parameter.data = value has no effect on a sharded parameter: change it in place, such as by "
    "parameter.data.copy_(value), or use parallel.strategy='ddp'"
)


def shard_fully(
    model: nn.Module, blocks: list[nn.Module], config: ParallelConfig, precision: Precision, mesh: DeviceMesh
) -> None:
    """Shard a model by FSDP2, in place. Every rank must call this.

    Scalars and complex parameters stay whole on every rank, and so do parameters of another dtype than the others of
    their module, or of one that gloo does not send: FSDP2 shards none of them. Nor would it ever gather parameters of a
    `ParameterList`, or of another module that is not called. Their gradients are averaged before the optimizer steps,
    see `whole_parameters`.

    Args:
        model: on the meta device, or with the same weights on every rank.
        blocks: modules in it to gather one at a time, outermost first.
        config: how to shard.
        precision: the dtype of gathered parameters.
        mesh: the ranks to shard over; if it has two dimensions, to replicate over and to shard over.

    Raises:
        ConfigError: a block cannot be sharded.
    """
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ConfigError(
                f"{name or type(model).__name__} is an {type(module).__name__} with sparse=True, and FSDP2 reduces no "
                "sparse gradients: set sparse=False, or parallel.strategy='ddp'"
            )
    casts = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    # Autocast casts the inputs of each operator that needs it, as under DDP.
    policy = MixedPrecisionPolicy(
        param_dtype=casts,
        reduce_dtype=None if precision == "fp32" else torch.float32,
        cast_forward_inputs=False,
    )
    as_is = MixedPrecisionPolicy(reduce_dtype=policy.reduce_dtype, cast_forward_inputs=False)
    # Pinned memory is for asynchronous copies to a GPU, and needs one.
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if config.cpu_offload else OffloadPolicy()
    # Innermost first: fully_shard skips the parameters of modules that are already sharded.
    roots = callable_roots(model)
    # By default torch leaves a root gathered, since its backward pass comes next; that of a frozen model never comes.
    reshards_root = None if any(parameter.requires_grad for parameter in model.parameters()) else True
    for parameter in model.parameters():
        if not parameter.is_contiguous() and not isinstance(parameter, DTensor):
            parameter.data = parameter.data.contiguous()  # torch shards no others
    for module in (*reversed(blocks), *(each for each in roots if not any(each is block for block in blocks))):
        whole = _not_shardable(module, over_gloo=mesh.device_type == "cpu")
        if not _is_called(module):
            whole.update(module.parameters(recurse=False))
        for apart in _of_another_dtype(module, casts, whole):
            fully_shard(apart, mesh=mesh, mp_policy=as_is, offload_policy=offload, ignored_params=whole)
        try:
            fully_shard(
                module,
                mesh=mesh,
                mp_policy=policy,
                offload_policy=offload,
                reshard_after_forward=reshards_root if module in roots else config.reshard_after_forward,
                ignored_params=whole,
            )
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"torch cannot shard {type(module).__name__} as a unit ({error}): name the classes of the blocks in "
                "parallel.shard_modules"
            ) from error


def _is_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or bool(_own_methods(type(module)))


def has_forward(module: nn.Module) -> bool:
    """Whether a module is called or has no networks in it, unlike a `ModuleList` or a class that only holds some."""
    if type(module).forward is not nn.Module.forward:
        return True
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return False
    own = set(module.parameters(recurse=False))
    parts = [set(child.parameters()) for child in module.children()]
    shares = len(own) + sum(map(len, parts)) != len(own.union(*parts))
    return shares or bool(_own_methods(type(module))) or (bool(own) and not any(parts))


def callable_roots(model: nn.Module) -> list[nn.Module]:
    """Return the model, or if it only holds others, as a `ModuleDict` does, the modules in it that can be called."""
    if has_forward(model):
        return [model]
    return [
        root for child in model.children() if any(True for _ in child.parameters()) for root in callable_roots(child)
    ]


def sharded_roots(model: nn.Module) -> list[FSDPModule]:
    """Return the outermost sharded modules of a model: itself, some if it is a container, or none."""
    return [root for root in callable_roots(model) if isinstance(root, FSDPModule)]


def whole_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of a sharded model that every rank holds whole; none of another model."""
    if not sharded_roots(model):
        return set()
    reshard([model])
    return {parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)}


def reshard(models: Iterable[nn.Module]) -> None:
    """Free the gathered weights that a forward pass without a backward pass has left in the outermost unit of a model.

    Otherwise they would be outdated after the next update, and what is written into them would be lost.
    """
    for unit in units_of(models):
        unit.reshard()


def units_of(models: Iterable[nn.Module]) -> list[FSDPModule]:
    """Return the modules of some models that FSDP2 gathers at a time."""
    return [each for model in models for each in model.modules() if isinstance(each, FSDPModule)]


def reduce_unused(models: Iterable[nn.Module]) -> None:
    """Make FSDP2 reduce a gradient of zero for each parameter that the backward pass of a rank does not reach.

    By default it reduces the gradients that a rank has. If these are of other parameters than another rank's, it adds
    gradients of different parameters, without an error.

    Raises:
        ConfigError: torch is too old.
    """
    for root in (root for model in models for root in sharded_roots(model)):
        if not hasattr(root, "set_reduce_scatter_unused_params"):
            raise ConfigError(
                "parallel.find_unused_parameters needs a newer torch for a sharded model: use torch>=2.13"
            )
        root.set_reduce_scatter_unused_params(True)


def _not_shardable(unit: nn.Module, *, over_gloo: bool) -> set[nn.Parameter]:
    """Return the parameters of a unit that cannot be sharded: scalars, empty and complex ones, and some dtypes.

    Adam updates a complex `DTensor` through a copy, and leaves it as it is. Dtypes are compared within a module.
    """
    found: set[nn.Parameter] = set()
    for module in unit.modules():
        own = [parameter for parameter in module.parameters(recurse=False) if not isinstance(parameter, DTensor)]
        shardable = [
            p
            for p in own
            if p.dim() and p.numel() and not p.is_complex() and not (over_gloo and p.dtype in NOT_SENT_BY_GLOO)
        ]
        found.update(p for p in own if not shardable or p.dtype != shardable[0].dtype or not p.dim() or not p.numel())
    return found


def _of_another_dtype(unit: nn.Module, casts: torch.dtype | None, whole: set[nn.Parameter]) -> list[list[nn.Module]]:
    """Return groups of modules that FSDP must gather apart from the rest of a unit.

    Its parameters, but for the `whole` ones, must have one dtype; and a norm with running means computes with weights
    of the dtype of these.
    """
    owned = {
        module: own[0].dtype
        for module in unit.modules()
        if (own := [p for p in module.parameters(recurse=False) if not isinstance(p, DTensor) and p not in whole])
    }
    dtypes = Counter(owned.values())
    usual = owned.get(unit) or max(dtypes, key=lambda dtype: dtypes[dtype], default=None)
    groups: dict[torch.dtype, list[nn.Module]] = {}
    for module, dtype in owned.items():
        is_norm = getattr(module, "running_mean", None) is not None
        if module is not unit and (dtype != usual or (casts is not None and is_norm)):
            groups.setdefault(dtype, []).append(module)
    return list(groups.values())


def gather_in_methods(model: nn.Module, is_in_step: Callable[[], bool]) -> None:
    """Let methods of sharded modules use their weights as `forward` does, when a step calls them.

    FSDP2 gathers a module's weights around `forward` only, so that `model.generate(...)` or `model.encode(x)` would
    meet shards. Elsewhere, as in `configure_optimizers`, a method gets the shards: gathering needs every rank.

    Args:
        model: sharded or not.
        is_in_step: whether a training or validation step runs, on every rank.
    """
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        calls = _Calls()
        module.register_forward_pre_hook(calls.enter, prepend=True)
        module.register_forward_hook(calls.leave, always_call=True)
        for name in _own_methods(type(module)):
            plain = getattr(module, name)
            register_fsdp_forward_method(module, name)
            setattr(module, name, _gathering(plain, vars(module)[name], is_in_step, calls))
    for root in callable_roots(model):
        if isinstance(root, FSDPModule):
            root.register_forward_pre_hook(_refuse_functional_call, prepend=True)


def _refuse_functional_call(*_: Any) -> None:
    """Raise if `torch.func.functional_call` calls a sharded model: torch ends without a message, or loses gradients."""
    if torch.compiler.is_compiling():
        return
    frame = inspect.currentframe()
    for _above in range(_FRAMES_OF_A_CALL):
        if frame is None:
            return
        if frame.f_code.co_name == "functional_call" and frame.f_globals.get("__name__", "").startswith("torch."):
            raise StepError(
                "torch.func.functional_call calls a sharded model, whose weights FSDP2 replaces by gathered ones: use "
                "parallel.strategy='ddp'"
            )
        frame = frame.f_back


def buffers_to_sync(models: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Return the buffers of sharded models, which DDP would broadcast from the main rank before a forward pass.

    A rank that changed its own, such as the codebook of a VQ-VAE, would otherwise train with other values than the
    main rank, whose values a checkpoint has. As with DDP, not those that a forward pass replaces by other tensors.
    """
    return [
        buffer
        for model in models
        if sharded_roots(model)
        for buffer in model.buffers()
        if not isinstance(buffer, DTensor)
    ]


def sync_buffers(model: nn.Module, world: World) -> None:
    """Overwrite the saved buffers of a sharded model, such as running means, by the main rank's, as DDP does.

    Every rank must call this.
    """
    if sharded_roots(model):
        names = model.state_dict(keep_vars=True).keys()
        for name, buffer in model.named_buffers():
            if name in names:
                world.broadcast_tensor(buffer)


def add_shard_advice(error: BaseException) -> None:
    """Add a note to torch's errors about weights of a sharded model that are not gathered, and about copies of it."""
    if isinstance(error, AssertionError) and "FSDP does not support deepcopy" in str(error):
        error.add_note(f"the model {COPIED}")
    if not isinstance(error, RuntimeError) or any(_IN_OPTIMIZER in note for note in getattr(error, "__notes__", ())):
        return
    if "mixed torch.Tensor and DTensor" in str(error):
        error.add_note(
            "a part of the model was called by itself, and under FSDP2 it has only the shards of its weights: call it "
            "in forward or another method of the model, or name its class in parallel.shard_modules. Or a method of "
            "the model was called outside of a step, where only forward gathers weights. Or weights were used in "
            "training_step after a forward pass: use them in on_step_end, when the weights of all models are shards"
        )
    elif "Cannot access storage of BatchedTensorImpl" in str(error):
        error.add_note(
            "torch.func (vmap, jacrev) called a model that FSDP2 has sharded, which gathers weights in forward: put "
            "the call into a method of the model, or use parallel.strategy='ddp' and self.unwrap(self.model)"
        )
    elif "Sharding propagation failed" in str(error) or "does not have a sharding strategy" in str(error):
        error.add_note(
            "outside of steps the weights of a sharded model are shards (DTensor), which this operation does not "
            "support: make the change in configure_models(), or use parallel.strategy='ddp'"
        )
    elif "appears to not have been used in the graph" in str(error):
        error.add_note(
            "under FSDP2 a backward pass frees the gathered weights, and a later torch.autograd.grad with respect to "
            "parameters of the model finds their shards: use parallel.strategy='ddp'"
        )
    elif "setStorage" in str(error) and "storage of size 0" in str(error):
        error.add_note(
            "under FSDP2 a backward pass frees the gathered weights, so that it cannot be differentiated again "
            "(create_graph=True): use parallel.strategy='ddp'"
        )


def add_optimizer_advice(error: Exception, optimizer: Optimizer) -> None:
    """Add a note to an error of an optimizer that steps sharded parameters."""
    error.add_note(
        f"raised by {type(optimizer).__name__}{_IN_OPTIMIZER}: if it does not support them, use "
        "parallel.strategy='ddp' or another optimizer"
    )


def check_functions(loss: torch.Tensor) -> None:
    """Check that no `torch.autograd.Function` of the user's got shards in place of weights, as adjoint methods may.

    Args:
        loss: with its graph.

    Raises:
        StepError: one did; its gradients of them would be None or zero, or not summed over the ranks.
    """
    seen: set[Any] = set()
    nodes: list[Any] = [loss.grad_fn]
    while nodes:
        if (node := nodes.pop()) is None or node in seen:
            continue
        seen.add(node)
        children = [child for child, _ in node.next_functions]
        nodes.extend(children)
        function = function_of(node)
        if function is None or function.__module__.partition(".")[0] == "torch":
            continue
        if any(isinstance(getattr(child, "variable", None), DTensor) for child in children):
            raise StepError(
                f"{function.__qualname__}.apply() got parameters of a module before FSDP2 has gathered them, and would "
                "compute gradients of their shards: call it in the forward of that module, or use "
                "parallel.strategy='ddp'"
            )


class RefuseLostChanges(TorchFunctionMode):
    """Refuses changes of sharded parameters that are lost without an error.

    Torch ignores `parameter.data = value`, and frees gathered weights with what a forward pass has changed in them.
    Costs microseconds per operator, and more for one that changes a tensor, so that it is for the first updates only.

    Args:
        models: with their shards.

    Raises:
        StepError: code in this context assigns `data` of a sharded parameter, or changes a gathered one.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        super().__init__()
        self._sharded = [
            (module, f"{path}.{key}".lstrip("."))
            for model in models
            for path, module in model.named_modules()
            for key, parameter in module._parameters.items()
            if isinstance(parameter, DTensor)
        ]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _SET_DATA and isinstance(args[0], DTensor):
            raise StepError(_DATA_ASSIGNED)
        name = getattr(func, "__name__", "")
        in_place = name.endswith("_") and not name.endswith("__") and name not in _CHANGE_NO_VALUES
        changes = func == _SET_DATA or name == "__setitem__" or in_place
        if changes and args and type(args[0]) in (torch.Tensor, nn.Parameter):
            self._check(args[0])
        return func(*args, **(kwargs or {}))

    def _check(self, changed: torch.Tensor) -> None:
        address = changed.untyped_storage().data_ptr()
        for module, path in self._sharded if address else ():
            parameter = module._parameters.get(path.rpartition(".")[2])
            if type(parameter) is nn.Parameter and parameter.untyped_storage().data_ptr() == address:
                raise StepError(
                    f"{path} is changed while FSDP2 has gathered it for a forward pass, after which the change is "
                    "lost: change it in on_step_end. To initialize it from data, call the model once with a batch in "
                    "configure_models(). Or use parallel.strategy='ddp'"
                )


class AssignedData:
    """Finds `parameter.data = value` for sharded parameters afterwards, in any code, without waiting for the device.

    It replaces the storage of the DTensor, which has no bytes, and not that of the shard. What replaces both, such as
    `module.to(dtype)`, has an effect.

    Args:
        models: with their shards, by name.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._seen = {
            f"{model}.{name}": (parameter, parameter.untyped_storage(), _shard(parameter))
            for model, module in models.items()
            for name, parameter in module.named_parameters()
            if isinstance(parameter, DTensor)
        }

    def check(self) -> None:
        """Raise for a parameter whose `data` was assigned since the last check. Any rank may call this, between steps.

        Raises:
            StepError: names the parameter.
        """
        for name, (parameter, storage, shard) in self._seen.items():
            if (new_storage := parameter.untyped_storage()) is storage:
                continue
            if (new_shard := _shard(parameter)) is shard:
                raise StepError(f"{name}: {_DATA_ASSIGNED}")
            self._seen[name] = parameter, new_storage, new_shard


def _shard(parameter: DTensor) -> torch.UntypedStorage:
    with torch.no_grad():
        return parameter.to_local().untyped_storage()


class _Calls:
    """Counts the calls of a module's `forward` and gathering methods in progress."""

    def __init__(self) -> None:
        self.depth = 0

    def enter(self, *_: Any) -> None:
        self.depth += 1

    def leave(self, *_: Any) -> None:
        self.depth -= 1


def _gathering(
    plain: Callable[..., Any], gathers: Callable[..., Any], is_in_step: Callable[[], bool], calls: _Calls
) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        # Inside a call of the same module the weights are gathered already.
        if calls.depth or not is_in_step():
            return plain(*args, **kwargs)
        calls.enter()
        try:
            return gathers(*args, **kwargs)
        finally:
            calls.leave()

    return call


def _own_methods(cls: type) -> list[str]:
    """Return the public methods that a class defines beyond those of `nn.Module`."""
    known = set(dir(nn.Module)) | set(dir(FSDPModule))
    names = {name for base in cls.__mro__ if not base.__module__.startswith("torch.") for name in vars(base)}
    return sorted(
        name
        for name in names - known
        if not name.startswith("_")
        and inspect.isfunction(function := inspect.getattr_static(cls, name))
        and not inspect.isgeneratorfunction(function)
    )
