"""The order of adding gradients: the same tree for any division of its leaves."""

from __future__ import annotations

import pytest
import torch

from headway.trainer.distributed.world import World
from headway.trainer.exact.gradient_tree import GradientTree, Node, covering_nodes, split_points


@pytest.mark.parametrize("num_parts", [1, 2, 3, 8, 13, 32])
def test_runs_of_parts_are_covered_by_few_nodes_of_the_tree(num_parts: int) -> None:
    tree = {*split_points(num_parts), *(Node(part, part + 1) for part in range(num_parts))}
    for start in range(num_parts):
        for stop in range(start + 1, num_parts + 1):
            nodes = covering_nodes(range(start, stop), num_parts)
            assert [part for node in nodes for part in range(*node)] == list(range(start, stop))
            assert set(nodes) <= tree
            assert len(nodes) <= 2 * num_parts.bit_length()


def test_sums_are_those_of_the_tree() -> None:
    """Numbers whose sum depends on the order; bfloat16 is summed in float32, float64 in float64."""
    numbers = torch.tensor([1.0] + [2.0**-24] * 6)
    parameters = [torch.zeros(2, 1, dtype=kind, requires_grad=True) for kind in (torch.float32, torch.float64)]
    small = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    tree = GradientTree([*parameters, small], 7, may_miss=False)
    for part, number in enumerate(numbers):
        for parameter in (*parameters, small):
            parameter.grad = torch.full_like(parameter, float(number) if parameter is not small else 1 + 2.0**-7 * part)
        tree.add(part)
        assert small.grad is None
    tree.combine(World.single("cpu"), [range(7)])
    a, b, c, d, e, f, g = numbers
    expected = (a + (b + c)) + ((d + e) + (f + g))
    assert expected > a + b + c + d + e + f + g
    assert torch.equal(parameters[0].grad, expected.expand(2, 1))
    assert parameters[1].grad is not None
    assert parameters[1].grad.dtype == torch.float64
    assert small.grad == torch.tensor(7 + 21 * 2.0**-7).bfloat16()
