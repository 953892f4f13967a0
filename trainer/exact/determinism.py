"""Make a micro-batch's results bit-identical in every process on one kind of hardware."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..data.tree import map_tensors

_DRIVER = Path("/proc/driver/nvidia/version")


def clone_batch(batch: Any) -> Any:
    """Clone a batch: the rounding of a matrix product may depend on the memory alignment of its rows."""
    return map_tensors(torch.Tensor.clone, batch)


def set_cublas_workspace() -> None:
    """Set the variable without which PyTorch refuses deterministic matrix products on GPUs.

    cuBLAS reads it once, at its first product in the process, so it is set as early as possible.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def deterministic_mode(device: torch.device) -> Iterator[None]:
    """Use deterministic algorithms, and on a CPU one thread, inside the context."""
    threads, benchmarks = torch.get_num_threads(), torch.backends.cudnn.benchmark
    mode, fills = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        if device.type == "cpu":
            # The number of threads changes how sums are split, and torchrun lowers it for several ranks.
            torch.set_num_threads(1)
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        torch.set_deterministic_debug_mode(mode)
        torch.backends.cudnn.benchmark = benchmarks
        torch.set_num_threads(threads)


def hardware_fingerprint(device: torch.device) -> dict[str, str]:
    """Return the hardware facts that rounding depends on; must be equal on all ranks and after a resume."""
    common = {"torch": torch.__version__}
    if device.type != "cuda":
        return {"computes on": f"{_cpu_name()} {torch.backends.cpu.get_cpu_capability()}", **common}
    return {"computes on": torch.cuda.get_device_name(device), **common, **_cuda_settings(device)}


def _cuda_settings(device: torch.device) -> dict[str, str]:
    """Return the versions and switches that choose the kernels of a GPU."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return {
        "CUDA": str(torch.version.cuda),
        "compute capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "cuDNN": str(cudnn.version()),  # type: ignore[no-untyped-call]
        "driver": _DRIVER.read_text().splitlines()[0] if _DRIVER.exists() else "",
        "TF32 in matrix products": str(matmul.allow_tf32),
        "TF32 in cuDNN": str(cudnn.allow_tf32),
        "reduced precision of float16 and bfloat16 sums": (
            f"{matmul.allow_fp16_reduced_precision_reduction} {matmul.allow_bf16_reduced_precision_reduction}"
        ),
        "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
