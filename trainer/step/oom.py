"""How much memory this rank has taken, and what to turn when there is not enough. Asks no other rank."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..callbacks.progress_bar import human_bytes

if TYPE_CHECKING:
    from ..trainer import Trainer

_STATM = Path("/proc/self/statm")


def peak_bytes(device: torch.device) -> int:
    """Returns the peak of what tensors took on a CUDA device since `reset_peak`; elsewhere `resident_bytes`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resident_bytes()


def reset_peak(device: torch.device) -> None:
    """Begins a new peak. Waits for nothing."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def resident_bytes() -> int:
    """Returns how much of this process lies in memory; its peak where the system tells no more."""
    import resource

    if _STATM.exists():
        return int(_STATM.read_text().split()[1]) * resource.getpagesize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error says that a device, or this machine, has no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def add_memory_advice(error: BaseException, trainer: Trainer[Any]) -> None:
    """Adds to an out-of-memory error what was taken, what the config says of memory, and what to turn."""
    with contextlib.suppress(Exception):  # Whatever goes wrong here, the error is what matters.
        error.add_note(f"{_memory_in_use(trainer)}. {_memory_settings(trainer)}. {_advice(trainer)}.")


def _memory_in_use(trainer: Trainer[Any]) -> str:
    who = f"rank {trainer.world.rank} of {trainer.world.size} ran out of memory after {trainer.global_step} updates"
    device = trainer.device
    if device.type != "cuda":
        return f"{who}, with {human_bytes(resident_bytes())} resident"
    allocated, reserved = peak_bytes(device), torch.cuda.max_memory_reserved(device)
    has = torch.cuda.get_device_properties(device).total_memory
    return (
        f"{who}, with a peak of {human_bytes(allocated)} allocated and {human_bytes(reserved)} reserved "
        f"of {human_bytes(has)}"
    )


def _memory_settings(trainer: Trainer[Any]) -> str:
    config, parallel = trainer.config, trainer.config.parallel
    return (
        f"In force: micro_batch_size={config.micro_batch_size}, global_batch_size={config.global_batch_size}, "
        f"gradient_accumulation_steps={config.gradient_accumulation_steps}, precision={config.precision!r}, "
        f"parallel.strategy={parallel.strategy!r}, "
        f"parallel.activation_checkpointing={parallel.activation_checkpointing!r}, "
        f"parallel.cpu_offload={parallel.cpu_offload}"
    )


def _advice(trainer: Trainer[Any]) -> str:
    config, parallel = trainer.config, trainer.config.parallel
    smaller = (
        "a smaller micro_batch_size (the update stays what it is, accumulation follows)"
        if config.global_batch_size is not None
        else "smaller batches of the loader with more gradient_accumulation_steps, or a global_batch_size and a "
        "micro_batch_size"
    )
    knobs = [smaller]
    is_sharded = trainer.world.size > 1 and parallel.strategy in ("fsdp", "hsdp")
    if not (config.halve_on_out_of_memory or config.exact or is_sharded):
        knobs.append("halve_on_out_of_memory=True, which finds a micro-batch that fits")
    if config.precision == "fp32":
        knobs.append("precision='bf16'")
    if parallel.activation_checkpointing == "none":
        knobs.append("parallel.activation_checkpointing='selective'")
    if parallel.activation_checkpointing != "full":
        knobs.append("parallel.activation_checkpointing='full'")
    if trainer.world.size > 1 and parallel.strategy == "ddp":
        knobs.append("parallel.strategy='fsdp'")
    elif trainer.world.size == 1 and parallel.strategy != "none":
        knobs.append("parallel.strategy='fsdp' on more ranks")
    elif trainer.world.size > 1 and not parallel.cpu_offload:
        knobs.append("more ranks; parallel.cpu_offload=True")
    return f"To need less: {'; '.join(knobs)}"
