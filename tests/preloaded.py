"""Imported by the server from which ranks are forked, because a rank would need seconds for it.

`headway.trainer` imports its names lazily, so its modules are imported one by one.
"""

from __future__ import annotations

import importlib
import pkgutil

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo  # noqa: F401 - DDP and FSDP import it when they wrap a model
import torch._inductor.utils  # noqa: F401
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.profiler._cupti_monitor  # noqa: F401 - an optimizer's first step imports it

import headway.datasets.stream  # noqa: F401
import headway.trainer

for _module in pkgutil.walk_packages(headway.trainer.__path__, "headway.trainer."):
    importlib.import_module(_module.name)
