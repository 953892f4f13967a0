"""Sum the gradients of all parts of an update in an order that does not depend on the ranks: a binary tree.

Parts 0 to P - 1 are the leaves; a node [low, high) is the sum of its two halves. Floating-point sums depend on the
order of additions, and this order depends only on P. Each rank has a range of the parts, sums every node inside its
range and sends the largest of these nodes; then each rank sums the rest of the tree for one slice of the elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch

from ..distributed.world import World
from ..errors import StepError

_CHUNK = 2**22
"""Number of elements per node to exchange at a time; bounds the memory of the exchange."""


class Node(NamedTuple):
    """A node of the tree, the sum of the parts `low` to `high - 1`."""

    low: int
    high: int


class GradientTree:
    """Sums the gradients of one rank's parts of an update, and then those of all ranks.

    Args:
        parameters: trainable parameters, in the same order on every rank.
        num_parts: P, the number of parts over all ranks.
        may_miss: whether parameters may lack a gradient in a part, which then counts as zero; a parameter without any
            gradient in the update gets none. Costs a wait for the device in every update.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], num_parts: int, *, may_miss: bool) -> None:
        self._parameters, self._num_parts, self._may_miss = parameters, num_parts, may_miss
        self._by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in parameters:
            # Sums in half precision would lose the contributions of single parts.
            dtype = torch.float32 if parameter.dtype in (torch.bfloat16, torch.float16) else parameter.dtype
            self._by_dtype.setdefault(dtype, []).append(parameter)
        self._sums: list[tuple[Node, list[torch.Tensor]]] = []

    def add(self, part: int) -> None:
        """Add the gradients of a part, and remove them from the parameters.

        Raises:
            StepError: a gradient is sparse, or missing without `may_miss`.
        """
        if any(p.grad is not None and p.grad.layout != torch.strided for p in self._parameters):
            raise StepError(
                "a parameter has a sparse gradient, but exact=True needs dense gradients: use Embedding(sparse=False), "
                "or remove exact"
            )
        missing = sum(p.grad is None for p in self._parameters)
        if missing and not self._may_miss:
            raise StepError(
                f"{missing} of {len(self._parameters)} parameters got no gradient in a micro-batch, but with "
                "exact=True each needs one: freeze unused parameters, remove them from the optimizer, or set "
                "parallel.find_unused_parameters=True"
            )
        flat = [torch.cat([_flat_gradient(p).to(dtype) for p in each]) for dtype, each in self._by_dtype.items()]
        if self._may_miss:
            flat.append(torch.tensor([float(p.grad is not None) for p in self._parameters], device=flat[0].device))
        self._push(part, flat)
        for parameter in self._parameters:
            parameter.grad = None

    def add_empty(self, part: int) -> None:
        """Add a part without rows, whose gradient is zero."""
        device = self._parameters[0].device
        flat = [
            torch.zeros(sum(p.numel() for p in each), dtype=dtype, device=device)
            for dtype, each in self._by_dtype.items()
        ]
        if self._may_miss:
            flat.append(torch.zeros(len(self._parameters), device=device))
        self._push(part, flat)

    def combine(self, world: World, rank_ranges: Sequence[range]) -> None:
        """Set the parameters' gradients to those of the whole update. Every rank must call this.

        Args:
            world: the ranks.
            rank_ranges: the parts of each rank.
        """
        assert [node for node, _ in self._sums] == covering_nodes(rank_ranges[world.rank], self._num_parts)
        flat = [
            _sum_over_ranks([sums[i] for _, sums in self._sums], world, rank_ranges, self._num_parts)
            for i in range(len(self._by_dtype) + self._may_miss)
        ]
        present = flat.pop().tolist() if self._may_miss else None
        for total, parameters in zip(flat, self._by_dtype.values(), strict=True):
            gradients = total.split([p.numel() for p in parameters])  # type: ignore[no-untyped-call]
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.view(parameter.shape).to(parameter.dtype)
        for parameter, parts in zip(self._parameters, present or (), strict=False):
            if not parts:
                parameter.grad = None

    def _push(self, part: int, flat: list[torch.Tensor]) -> None:
        """Add a leaf, and sum every node completed by it."""
        node, tree = Node(part, part + 1), split_points(self._num_parts)
        while self._sums and tree.get(Node(self._sums[-1][0].low, node.high)) == node.low:
            left, before = self._sums.pop()
            for total, more in zip(before, flat, strict=True):
                total += more
            node, flat = Node(left.low, node.high), before
        self._sums.append((node, flat))


@cache
def split_points(num_parts: int) -> Mapping[Node, int]:
    """Return the inner nodes of a tree of `num_parts` leaves, each with the first part of its second half."""
    found: dict[Node, int] = {}
    todo = [Node(0, num_parts)]
    while todo:
        node = todo.pop()
        if node.high - node.low > 1:
            found[node] = middle = (node.low + node.high) // 2
            todo += [Node(node.low, middle), Node(middle, node.high)]
    return found


def covering_nodes(parts: range, num_parts: int) -> list[Node]:
    """Return the fewest nodes that cover a range of parts, in order.

    Example:
        >>> covering_nodes(range(3, 8), 8)
        [Node(low=3, high=4), Node(low=4, high=8)]
    """
    return _covering_nodes(parts, Node(0, num_parts), split_points(num_parts))


def _covering_nodes(parts: range, node: Node, tree: Mapping[Node, int]) -> list[Node]:
    if node.high <= parts.start or parts.stop <= node.low or node.low == node.high:
        return []
    if parts.start <= node.low and node.high <= parts.stop:
        return [node]
    middle = tree[node]
    return _covering_nodes(parts, Node(node.low, middle), tree) + _covering_nodes(parts, Node(middle, node.high), tree)


def _sum_over_ranks(
    own: Sequence[torch.Tensor], world: World, rank_ranges: Sequence[range], num_parts: int
) -> torch.Tensor:
    """Return the root of the tree. Each rank sums one slice of it, from its own and the received nodes."""
    if world.size == 1:
        return own[0]
    nodes = [covering_nodes(parts, num_parts) for parts in rank_ranges]
    counts = [len(each) for each in nodes]
    in_order = [node for each in nodes for node in each]
    length = len(own[0])
    total = torch.empty_like(own[0])
    for start in range(0, length, _CHUNK):
        stop = min(start + _CHUNK, length)
        width = -(-(stop - start) // world.size)
        # The padding of the last slice is dropped below.
        sent = own[0].new_zeros(world.size, len(own), width)
        for rank in range(world.size):
            first, last = start + rank * width, min(start + (rank + 1) * width, stop)
            for i, each in enumerate(own):
                sent[rank, i, : max(0, last - first)] = each[first:last]
        received = world.all_to_all(sent.view(-1), give=len(own) * width, take=[count * width for count in counts])
        sums = dict(zip(in_order, received.split(width), strict=True))  # type: ignore[no-untyped-call]
        total[start:stop] = world.all_gather(_root(Node(0, num_parts), sums, split_points(num_parts)))[: stop - start]
    return total


def _root(node: Node, sums: Mapping[Node, torch.Tensor], tree: Mapping[Node, int]) -> torch.Tensor:
    if node in sums:
        return sums[node]
    left = _root(Node(node.low, tree[node]), sums, tree)
    return left.add_(_root(Node(tree[node], node.high), sums, tree))


def _flat_gradient(parameter: torch.Tensor) -> torch.Tensor:
    gradient = parameter.grad
    return (torch.zeros_like(parameter) if gradient is None else gradient).detach().reshape(-1)
