"""Activation checkpointing: which results of a block are saved for backward and which are recomputed."""

from __future__ import annotations

from functools import partial
from typing import Literal

from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ..private_torch import expensive_operators, wrap_in_checkpoint


def wrap_checkpointed(block: nn.Module, policy: Literal["full", "selective"]) -> nn.Module:
    """Return the block wrapped so that it saves less for backward; results and random numbers stay the same.

    Args:
        block: called once per forward pass.
        policy: "full" keeps only its inputs; "selective" also the results of matrix products, convolutions and
            attention, so that recomputing is cheap: norms, activations, dropout, rotations.
    """
    if policy == "full":
        return wrap_in_checkpoint(block)
    return wrap_in_checkpoint(block, context_fn=partial(create_selective_checkpoint_contexts, expensive_operators()))
