"""The norm of a gradient and its bounds: torch's own numbers, without sorting tensors that are all of one kind."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm

from .parallel import whole


def total_norm(gradients: list[Tensor]) -> Tensor:
    """Returns the norm of one or more gradients together, one number, equal to `get_total_norm`'s to the last bit.

    Every rank must call this: parts of sharded gradients are put together.
    """
    if not _are_alike(gradients):
        return whole(get_total_norm([numbers_of(each) for each in gradients]))
    with torch.no_grad():
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    return norm


def clip_norm(parameters: Sequence[Tensor], limit: float, norm: Tensor) -> None:
    """Scales the gradients of parameters that all have one, so that their norm is no larger than the limit.

    In place, and equal to `clip_grads_with_norm_` to the last bit.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not _are_alike(gradients):
        clip_grads_with_norm_([p for p in parameters if p.grad is None or not p.grad.is_sparse], limit, norm)
        sparse = [gradient for gradient in gradients if gradient.is_sparse]
        # Rows that occur twice are added up later, which scaling does not mind.
        for gradient in sparse:
            gradient._values().mul_((limit / (norm + 1e-6)).clamp(max=1.0).to(gradient.device))
        return
    with torch.no_grad():
        torch._foreach_mul_(gradients, (norm + 1e-6).reciprocal_().mul_(limit).clamp_(max=1.0))


def clip_value(parameters: Sequence[Tensor], limit: float) -> None:
    """Bounds every number of the gradients of some parameters, in place."""
    clip_grad_value_([p for p in parameters if p.grad is None or not p.grad.is_sparse], limit)
    for p in parameters:
        if p.grad is not None and p.grad.is_sparse:
            p.grad = p.grad.coalesce()
            p.grad._values().clamp_(-limit, limit)


def numbers_of(gradient: Tensor) -> Tensor:
    """Returns a gradient as it is, or of a sparse one what is not zero."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _are_alike(gradients: list[Tensor]) -> bool:
    """Whether they are plain tensors of one dtype on one device, which torch finds out by sorting them."""
    device, dtype = gradients[0].device, gradients[0].dtype
    # A loop, which takes half as long as `all`.
    for gradient in gradients:  # noqa: SIM110
        if type(gradient) is not Tensor or gradient.dtype != dtype or gradient.device != device or gradient.is_sparse:
            return False
    return True
