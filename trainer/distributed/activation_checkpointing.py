"""Activation checkpointing: which results of a block are saved for backward and which are recomputed."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import create_selective_checkpoint_contexts


def wrap_checkpointed(block: nn.Module, policy: Literal["full", "selective"]) -> nn.Module:
    """Return the block wrapped so that it saves less for backward; results and random numbers stay the same.

    Args:
        block: called once per forward pass.
        policy: "full" keeps only its inputs; "selective" also the results of matrix products, convolutions and
            attention, so that recomputing is cheap: norms, activations, dropout, rotations.
    """
    if policy == "full":
        return checkpoint_wrapper(block)
    return checkpoint_wrapper(block, context_fn=partial(create_selective_checkpoint_contexts, _ops_to_save()))


def _ops_to_save() -> list[Any]:
    """Return the operators whose results are kept, because recomputing them is expensive.

    Source: the list of pytorch/torchtitan, torchtitan/distributed/activation_checkpoint.py and
    models/llama3/parallelize.py at cfb9326; torchtitan saves every second matrix product, this saves all. Batched
    products (bmm) are left out: hand-written attention computes its T x T scores with them.
    """
    aten, names = torch.ops.aten, torch.ops
    return [
        aten.mm.default,
        aten.addmm.default,  # a linear layer with a bias
        aten._scaled_mm.default,  # float8
        aten.convolution.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_fused_attention_overrideable.default,
        torch._higher_order_ops.flex_attention,
        aten.max.default,  # float8 computes its scale from it
        names._c10d_functional.reduce_scatter_tensor.default,  # the user's tensor parallelism
    ]
