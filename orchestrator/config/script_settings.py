"""What a script sets in its process before a run, for the workers, which do not run the script.

Without this, workers would compute with torch's default settings, and would not see the script's arguments.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from ray import cloudpickle

# Launchers and libraries set these, for one process or machine.
_OF_A_PROCESS = re.compile(
    "RAY_|HEADWAY_|TUNE_|KMP_|CRC32C_|TORCHINDUCTOR_CACHE_DIR$|"
    "PYTHON|PYTEST_|LD_|SLURM_|TORCHELASTIC_|MASTER_|LOCAL_|GROUP_|ROLE_|WANDB_SERVICE|WANDB__|"
    "(NODE_RANK|RANK|WORLD_SIZE|OMP_NUM_THREADS|PATH|HOME|TMPDIR|PWD|OLDPWD|.*_VISIBLE_DEVICES)$"
)


def _flag(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


_TORCH: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic algorithms": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "anomaly detection": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "cudnn.benchmark": _flag(torch.backends.cudnn, "benchmark"),
    "cudnn.deterministic": _flag(torch.backends.cudnn, "deterministic"),
    "float16 reduction": _flag(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    "bfloat16 reduction": _flag(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
}


class _Settings(NamedTuple):
    arguments: list[str]
    variables: dict[str, str]
    torch: dict[str, Any]


def pickle_with_settings(value: object, others: Collection[str]) -> bytes:
    """Pickle a value together with the script's arguments, environment variables and torch settings.

    Args:
        value: anything that cloudpickle can pickle.
        others: names of variables that workers get in another way.
    """
    settings = _Settings(sys.argv, _variables(others), _torch_settings())
    pickled: bytes = cloudpickle.dumps((settings, cloudpickle.dumps(value)))
    return pickled


def unpickle_with_settings(pickled: bytes) -> Any:
    """Set in this process what the script has set, and return the value."""
    settings, value = cloudpickle.loads(pickled)
    # First: modules may read the environment and the arguments when they are imported.
    sys.argv[:] = settings.arguments
    os.environ.update(settings.variables)
    here = _torch_settings()
    for name, wanted in settings.torch.items():
        if name in here and here[name] != wanted:
            _TORCH[name][1](wanted)
    return cloudpickle.loads(value)


def _variables(others: Collection[str]) -> dict[str, str]:
    """Return the environment variables that this process has set or changed since it was started."""
    try:
        lines = Path("/proc/self/environ").read_bytes().decode(errors="surrogateescape").split("\0")
    except OSError:
        return {}  # not Linux
    at_start = dict(each.split("=", 1) for each in lines if "=" in each)
    return {
        name: value
        for name, value in os.environ.items()
        if at_start.get(name) != value and name not in others and not _OF_A_PROCESS.match(name)
    }


def _torch_settings() -> dict[str, Any]:
    found = {}
    for name, (get, _) in _TORCH.items():
        # Once newer names of a setting are in use, torch refuses to read the older ones.
        with suppress(RuntimeError, AttributeError):
            found[name] = get()
    return found
