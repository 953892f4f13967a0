"""Norm and clipping are torch's, bit for bit, whatever kinds of gradients there are."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from headway.trainer.clipping import clip_norm, total_norm

KINDS = {
    "float32": [torch.float32] * 3,
    "bfloat16": [torch.bfloat16] * 3,
    "mixed": [torch.float32, torch.bfloat16, torch.float64],
}


def parameters(dtypes: list[torch.dtype]) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    made = []
    for shape, dtype in zip([(3, 4), (7,), (100, 30)], dtypes, strict=True):
        made.append(torch.nn.Parameter(torch.zeros(shape, dtype=dtype)))
        made[-1].grad = torch.randn(shape, generator=generator).to(dtype)
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limit", [0.37, 1.0, 3.0, 1e6])
def test_norm_and_clipping_equal_torch_to_the_last_bit(kind: str, limit: float) -> None:
    ours, torchs = parameters(KINDS[kind]), parameters(KINDS[kind])
    norm, expected = total_norm([p.grad for p in ours]), get_total_norm([p.grad for p in torchs])
    assert torch.equal(norm, expected)
    clip_norm(ours, limit, norm)
    clip_grads_with_norm_(torchs, limit, expected)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, torchs, strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_gives_a_norm_that_is_not(value: float) -> None:
    given = parameters(KINDS["float32"])
    given[1].grad[3] = value
    assert not total_norm([p.grad for p in given]).isfinite()


def test_the_norm_has_no_graph_even_where_a_gradient_has() -> None:
    given = parameters(KINDS["float32"])
    given[0].grad.requires_grad_()
    norm = total_norm([p.grad for p in given])
    assert not norm.requires_grad
    clip_norm(given, 0.1, norm)
