"""The private functions of torch that Headway calls, each with what it does without them."""

from __future__ import annotations

import datetime
import operator
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Store
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from .errors import ConfigError


def store_of(group: dist.ProcessGroup) -> Store | None:
    """Return the key-value store through which a process group was started; None if torch does not tell."""
    get = getattr(group, "get_group_store", None)
    return None if get is None else get()


def version_of(tensor: torch.Tensor) -> int | None:
    """Return the number of changes of a tensor in place; None if torch does not tell."""
    return getattr(tensor, "_version", None)


def versions_of(tensors: Sequence[torch.Tensor]) -> Sequence[int | None]:
    """Return `version_of` each tensor, in half the time."""
    try:
        return list(map(operator.attrgetter("_version"), tensors))
    except AttributeError:
        return [None] * len(tensors)


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Whether a backward pass calls hooks of the user's for a parameter; False if torch does not tell."""
    return bool(getattr(parameter, "_backward_hooks", None) or getattr(parameter, "_post_accumulate_grad_hooks", None))


def has_tensor_hooks(parameter: nn.Parameter) -> bool:
    """Whether `register_hook` has given a parameter a hook; False if torch does not tell."""
    return bool(getattr(parameter, "_backward_hooks", None))


def written_arguments(operator: Any) -> list[tuple[int, str]]:
    """Return position and name of the arguments that an operator changes in place; by its name without a schema."""
    if (schema := getattr(operator, "_schema", None)) is None:
        return [(0, "self")] if str(operator.overloadpacket).endswith("_") else []
    return [
        (i, each.name)
        for i, each in enumerate(schema.arguments)
        if each.alias_info is not None and each.alias_info.is_write
    ]


def returns_view(operator: Any) -> bool:
    """Whether an operator returns a view of its first argument; False without a schema."""
    schema = getattr(operator, "_schema", None)
    alias = schema.arguments[0].alias_info if schema is not None and schema.arguments else None
    return alias is not None and not alias.is_write


def function_of(node: Any) -> type | None:
    """Return the `torch.autograd.Function` of a node of a graph; None for another node, or if torch does not tell."""
    return getattr(node, "_forward_cls", None)


def is_conversion(operator: Any) -> bool:
    """Whether an operator gives a tensor another type or device; a torch with another one sees new values in it."""
    return str(operator.overloadpacket) == "aten._to_copy"


def shut_down_workers(batches: Iterator[Any] | None) -> None:
    """Shut down the worker processes behind an iterator of a DataLoader, if there are any.

    They would end with the iterator, but the traceback of an error in a row keeps it alive. Without the function, they
    end when that is gone.
    """
    if (shut_down := getattr(batches, "_shutdown_workers", None)) is not None:
        shut_down()


def forget_iterator(loader: DataLoader[Any]) -> Iterator[Any] | None:
    """Let a loader with persistent workers start new ones, and return the iterator that has them, if there is one."""
    iterator: Iterator[Any] | None = vars(loader).get("_iterator")
    if iterator is not None:
        loader._iterator = None
    return iterator


def inner_schedulers(scheduler: LRScheduler) -> Sequence[LRScheduler]:
    """Return the schedulers inside one, such as a `SequentialLR`; without its attribute, those in any list of it."""
    if (inner := getattr(scheduler, "_schedulers", None)) is not None:
        return list(inner)
    lists = (value for value in vars(scheduler).values() if isinstance(value, (list, tuple)))
    return [each for values in lists for each in values if isinstance(each, LRScheduler)]


def set_last_lr(scheduler: LRScheduler, rates: list[Any]) -> None:
    """Let `get_last_lr` return these rates; without the attribute, it returns those of the last step until the next."""
    if hasattr(scheduler, "_last_lr"):
        scheduler._last_lr = rates


def can_skip(optimizer: Optimizer) -> bool:
    """Whether a flag on the device can make the optimizer skip its step, as for torch's fused ones.

    Without the attribute, the flag is read before the step.
    """
    return getattr(optimizer, "_step_supports_amp_scaling", False) and all(
        group.get("fused") for group in optimizer.param_groups
    )


def foreach_norm(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the norm of each tensor."""
    if (function := getattr(torch, "_foreach_norm", None)) is not None:
        norms: Sequence[torch.Tensor] = function(tensors)
        return norms
    return [torch.linalg.vector_norm(tensor) for tensor in tensors]


def foreach_mul_(tensors: Sequence[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply tensors by a number, in place."""
    if (function := getattr(torch, "_foreach_mul_", None)) is not None:
        function(tensors, factor)
        return
    for tensor in tensors:
        tensor.mul_(factor)


def foreach_copy_(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *, non_blocking: bool = False
) -> None:
    """Copy each tensor of `sources` to that of `targets`, in place."""
    if (function := getattr(torch, "_foreach_copy_", None)) is not None:
        function(targets, sources, non_blocking=non_blocking)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=non_blocking)


def foreach_lerp_(tensors: Sequence[torch.Tensor], ends: Sequence[torch.Tensor], weight: float) -> None:
    """Move each tensor towards that of `ends`, by this part of their distance, in place."""
    if (function := getattr(torch, "_foreach_lerp_", None)) is not None:
        function(tensors, ends, weight)
        return
    for tensor, end in zip(tensors, ends, strict=True):
        tensor.lerp_(end, weight)


def chunk_of(tensor: DTensor) -> tuple[Sequence[int], Sequence[int]]:
    """Return the offsets and sizes of the part of a tensor that this rank holds.

    Raises:
        NotImplementedError: torch does not tell, and the placements are others than `Shard` and `Replicate`.
    """
    # Distributed Checkpoint calls the same method.
    if (create := getattr(tensor, "__create_chunk_list__", None)) is not None:
        (chunk,) = create()
        return chunk.offsets, chunk.sizes
    offsets, sizes = [0] * tensor.dim(), list(tensor.shape)
    for dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        if type(placement) is not Shard:
            raise NotImplementedError(f"this torch does not tell which part of a tensor a rank has for {placement}")
        # As torch.chunk, of what the dimensions of the mesh before this one have left.
        along, rank = placement.dim, tensor.device_mesh.get_local_rank(dim)
        step = -(-sizes[along] // tensor.device_mesh.size(dim))
        first = min(step * rank, sizes[along])
        sizes[along] = min(step, sizes[along] - first)
        offsets[along] += first
    return offsets, sizes


def set_group_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Set the timeout of a process group's later collectives; without a function for it, warn that it stays as it is.

    Public in torch since 2.14. Source for torch before that: torchtitan calls the same private function after its first
    step, in `set_pg_timeouts` of torchtitan/distributed/utils.py at cfb9326.
    """
    function = getattr(dist, "set_timeout", None) or getattr(distributed_c10d, "_set_pg_timeout", None)
    if function is None:
        warnings.warn(
            "this torch cannot change the timeout of a process group: parallel.step_timeout has no effect",
            stacklevel=2,
        )
        return
    function(datetime.timedelta(seconds=seconds), group)


def compile_in_place(module: nn.Module) -> None:
    """Compile the calls of a module, whose weights keep their names."""
    module.compile()
    if not (type(module).__module__.startswith("torch.nn.") and hasattr(module, "_call_impl")):
        return

    # Dynamo skips frames of torch's own classes, and would compile nothing: it has to start from another one.
    # `OptimizedModule` does the same, but would change the names of the weights.
    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    module._compiled_call_impl = torch.compile(call)


def is_compiled(module: nn.Module) -> bool:
    """Whether a module was compiled, by `torch.compile` or in place; without torch's attributes, never."""
    return compiled_module(module) is not None or getattr(module, "_compiled_call_impl", None) is not None


def compiled_module(module: nn.Module) -> nn.Module | None:
    """Return the module inside the result of `torch.compile`; None for any other module."""
    return dict(module.named_children()).get("_orig_mod")


def wrap_in_checkpoint(module: nn.Module, **options: Any) -> nn.Module:
    """Return a module that computes the activations of this one again in its backward pass; the weights keep names.

    Raises:
        ConfigError: torch has no such wrapper.
    """
    try:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    except ImportError as error:
        raise ConfigError(
            "parallel.activation_checkpointing needs torch's checkpoint_wrapper, which this torch does not have: leave "
            "it out, and call torch.utils.checkpoint.checkpoint in the model"
        ) from error
    return checkpoint_wrapper(module, **options)


def checkpointed_module(module: nn.Module) -> nn.Module | None:
    """Return the module inside what `wrap_in_checkpoint` returns; None for any other module."""
    return dict(module.named_children()).get("_checkpoint_wrapped_module")


def expensive_operators() -> list[Any]:
    """Return the operators whose results selective activation checkpointing keeps; leaves out what torch has not.

    Source: the list of pytorch/torchtitan, torchtitan/distributed/activation_checkpoint.py and
    models/llama3/parallelize.py at cfb9326; torchtitan saves every second matrix product, this saves all. Batched
    products (bmm) are left out: hand-written attention computes its T x T scores with them.
    """
    names = (
        *("mm", "addmm", "convolution"),
        *("_scaled_mm", "max"),  # float8, which computes its scale from the maximum
        *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention"),
        *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_cudnn_attention"),
        "_scaled_dot_product_fused_attention_overrideable",
    )
    aten, collectives = torch.ops.aten, torch.ops._c10d_functional
    flex_attention = getattr(getattr(torch, "_higher_order_ops", None), "flex_attention", None)
    return [
        *(getattr(aten, name).default for name in names if hasattr(aten, name)),
        *([] if flex_attention is None else [flex_attention]),
        # The user's tensor parallelism.
        *([collectives.reduce_scatter_tensor.default] if hasattr(collectives, "reduce_scatter_tensor") else []),
    ]


def memory_history(*, most_allocations: int) -> Callable[[str], None] | None:
    """Record the allocations of a GPU, and return what writes them to a file and ends it; None without the functions.

    Source: torch documents these private functions under "Understanding CUDA Memory Usage".
    """
    record = getattr(torch.cuda.memory, "_record_memory_history", None)
    dump = getattr(torch.cuda.memory, "_dump_snapshot", None)
    if record is None or dump is None:
        warnings.warn("this torch cannot record allocations: the profile is without them", stacklevel=2)
        return None
    record(max_entries=most_allocations)

    def write(path: str) -> None:
        dump(path)
        record(enabled=None)

    return write


def inductor_folder() -> Path:
    """Return the folder in which Inductor keeps what it has built; without the function, that of the environment."""
    try:
        from torch._inductor.runtime.cache_dir_utils import cache_dir
    except ImportError:
        return Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", "/nonexistent"))
    return Path(cache_dir())
