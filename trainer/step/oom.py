"""Memory use of this rank, and advice after an out-of-memory error. No collectives."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch

from ..config import TrainerConfig
from ..distributed.world import World
from ..metrics.units import human_bytes

_OUT_OF_MEMORY = (
    "DefaultCPUAllocator",
    "CUDA error: out of memory",
    "CUDA out of memory",
    "HIP out of memory",
    "MPS backend out of memory",
    "Cuda failure 'out of memory'",
    "Cuda failure 2 'out of memory'",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUSPARSE_STATUS_ALLOC_FAILED",
)
"""What errors say that are not `torch.OutOfMemoryError`.

Source: `should_reduce_batch_size` of Accelerate, `_is_cuda_oom` of Composer, and NCCL's `CUDACHECK`.
"""

_STATM = Path("/proc/self/statm")


def peak_bytes(device: torch.device) -> int:
    """Return the peak of allocated bytes on a CUDA device since `reset_peak`; otherwise `resident_bytes`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resident_bytes()


def reset_peak(device: torch.device) -> None:
    """Start a new peak on a CUDA device. Does not synchronize."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def resident_bytes() -> int:
    """Return the resident bytes of this process; without procfs, their peak."""
    import resource

    if _STATM.exists():
        return int(_STATM.read_text().split()[1]) * resource.getpagesize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error means that a device or the host is out of memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(each in str(error) for each in _OUT_OF_MEMORY)


def add_memory_advice(error: BaseException, config: TrainerConfig, world: World, *, step: int, may_halve: bool) -> None:
    """Add a note to an out-of-memory error: memory in use, relevant settings, and changes that need less memory.

    Args:
        error: gets the note.
        config: of the run.
        world: the ranks.
        step: completed updates.
        may_halve: whether halve_on_out_of_memory is supported.
    """
    with contextlib.suppress(Exception):  # A failure here must not hide the error itself.
        notes = _memory_in_use(world, step), _memory_settings(config), _advice(config, world, may_halve=may_halve)
        error.add_note(f"{'. '.join(notes)}.")


def _memory_in_use(world: World, step: int) -> str:
    who = f"rank {world.rank} of {world.size} ran out of memory after {step} updates"
    device = world.device
    if device.type != "cuda":
        return f"{who}, with {human_bytes(resident_bytes())} resident"
    allocated, reserved = peak_bytes(device), torch.cuda.max_memory_reserved(device)
    has = torch.cuda.get_device_properties(device).total_memory
    return (
        f"{who}, with a peak of {human_bytes(allocated)} allocated and {human_bytes(reserved)} reserved "
        f"of {human_bytes(has)}"
    )


def _memory_settings(config: TrainerConfig) -> str:
    parallel = config.parallel
    return (
        f"Settings: micro_batch_size={config.micro_batch_size}, global_batch_size={config.global_batch_size}, "
        f"gradient_accumulation_steps={config.gradient_accumulation_steps}, precision={config.precision!r}, "
        f"parallel.strategy={parallel.strategy!r}, "
        f"parallel.activation_checkpointing={parallel.activation_checkpointing!r}, "
        f"parallel.cpu_offload={parallel.cpu_offload}"
    )


def _advice(config: TrainerConfig, world: World, *, may_halve: bool) -> str:
    parallel = config.parallel
    smaller = (
        "a smaller micro_batch_size (gradient accumulation keeps the update equal)"
        if config.global_batch_size is not None
        else "smaller batches in the loader and more gradient_accumulation_steps, or a global_batch_size and a "
        "micro_batch_size"
    )
    knobs = [smaller]
    is_sharded = world.size > 1 and parallel.strategy in ("fsdp", "hsdp")
    if may_halve and not (config.halve_on_out_of_memory or is_sharded):
        knobs.append("halve_on_out_of_memory=True, which finds a micro-batch that fits")
    if config.precision == "fp32":
        knobs.append("precision='bf16'")
    if parallel.activation_checkpointing == "none":
        knobs.append("parallel.activation_checkpointing='selective'")
    if parallel.activation_checkpointing != "full":
        knobs.append("parallel.activation_checkpointing='full'")
    if world.size > 1 and parallel.strategy == "ddp":
        knobs.append("parallel.strategy='fsdp'")
    elif world.size == 1 and parallel.strategy != "none":
        knobs.append("parallel.strategy='fsdp' on more ranks")
    elif world.size > 1 and not parallel.cpu_offload:
        knobs.append("more ranks; parallel.cpu_offload=True")
    return f"To use less memory: {'; '.join(knobs)}"
