"""Adds up the gradients of all parts of an update in one order, whoever computes them: a binary tree over the parts.

Parts 0 to P - 1 are the leaves; a node [low, high) is the sum of its halves, cut in the middle. Floating-point sums
depend on the order of additions, and this order depends on P alone. Each rank has a run of the parts, adds up every
node that lies inside its run, and sends the largest of them; what is left of the tree is added up after the exchange,
by every rank for a slice of the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch

from ..distributed.world import World
from ..errors import StepError

_NUMBERS_AT_A_TIME = 2**22
"""So many numbers of each node are exchanged at a time: bounds what the exchange takes besides the gradients."""


class Node(NamedTuple):
    """The parts `low` to `high - 1`, which one place of the tree adds up."""

    low: int
    high: int


class GradientTree:
    """The gradients of one rank's parts of an update, on their way to those of the whole update.

    Args:
        parameters: that learn, in an order that is the same on every rank.
        num_parts: P, over all ranks.
        may_miss: whether a part may leave parameters without a gradient, which then counts as zero; one that no part
            on any rank gives a gradient ends without. Asking costs a wait for the device in every update.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], num_parts: int, *, may_miss: bool) -> None:
        self._parameters, self._num_parts, self._may_miss = parameters, num_parts, may_miss
        self._kinds: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in parameters:
            # Sums of bfloat16 numbers in bfloat16 would lose what single parts add.
            kind = torch.float32 if parameter.dtype in (torch.bfloat16, torch.float16) else parameter.dtype
            self._kinds.setdefault(kind, []).append(parameter)
        self._sums: list[tuple[Node, list[torch.Tensor]]] = []

    def add(self, part: int) -> None:
        """Takes the gradients that a part has left in the parameters, and leaves none there.

        Raises:
            StepError: a parameter has none where none may be missing, or one that is sparse.
        """
        if any(p.grad is not None and p.grad.layout != torch.strided for p in self._parameters):
            raise StepError(
                "a parameter has a sparse gradient, and exact=True adds gradients up as dense ones: use "
                "Embedding(sparse=False), or leave exact out"
            )
        missing = sum(p.grad is None for p in self._parameters)
        if missing and not self._may_miss:
            raise StepError(
                f"{missing} of {len(self._parameters)} parameters got no gradient in a micro-batch, and with "
                "exact=True each needs one: freeze what is not used, leave it out of the optimizer, or set "
                "parallel.find_unused_parameters=True"
            )
        flat = [torch.cat([_flat_gradient(p).to(kind) for p in each]) for kind, each in self._kinds.items()]
        if self._may_miss:
            flat.append(torch.tensor([float(p.grad is not None) for p in self._parameters], device=flat[0].device))
        self._push(part, flat)
        for parameter in self._parameters:
            parameter.grad = None

    def add_empty(self, part: int) -> None:
        """Counts a part that has no rows: its gradient is zero."""
        device = self._parameters[0].device
        flat = [
            torch.zeros(sum(p.numel() for p in each), dtype=kind, device=device) for kind, each in self._kinds.items()
        ]
        if self._may_miss:
            flat.append(torch.zeros(len(self._parameters), device=device))
        self._push(part, flat)

    def combine(self, world: World, rank_ranges: Sequence[range]) -> None:
        """Leaves the gradient of the whole update in the parameters. Every rank must call this.

        Args:
            world: the ranks.
            rank_ranges: the parts of each rank.
        """
        assert [node for node, _ in self._sums] == covering_nodes(rank_ranges[world.rank], self._num_parts)
        flat = [
            _sum_over_ranks([sums[i] for _, sums in self._sums], world, rank_ranges, self._num_parts)
            for i in range(len(self._kinds) + self._may_miss)
        ]
        present = flat.pop().tolist() if self._may_miss else None
        for whole, parameters in zip(flat, self._kinds.values(), strict=True):
            pieces = whole.split([p.numel() for p in parameters])  # type: ignore[no-untyped-call]
            for parameter, piece in zip(parameters, pieces, strict=True):
                parameter.grad = piece.view(parameter.shape).to(parameter.dtype)
        for parameter, parts in zip(self._parameters, present or (), strict=False):
            if not parts:
                parameter.grad = None

    def _push(self, part: int, flat: list[torch.Tensor]) -> None:
        """Adds a leaf, and every node that it completes."""
        node, tree = Node(part, part + 1), split_points(self._num_parts)
        while self._sums and tree.get(Node(self._sums[-1][0].low, node.high)) == node.low:
            left, before = self._sums.pop()
            for total, more in zip(before, flat, strict=True):
                total += more
            node, flat = Node(left.low, node.high), before
        self._sums.append((node, flat))


@cache
def split_points(num_parts: int) -> Mapping[Node, int]:
    """Returns every node of the tree over so many parts that is no leaf, with the part where its second half begins."""
    found: dict[Node, int] = {}
    todo = [Node(0, num_parts)]
    while todo:
        node = todo.pop()
        if node.high - node.low > 1:
            found[node] = middle = (node.low + node.high) // 2
            todo += [Node(node.low, middle), Node(middle, node.high)]
    return found


def covering_nodes(run: range, num_parts: int) -> list[Node]:
    """Returns the fewest nodes that make up a run of parts, in their order.

    Example:
        >>> covering_nodes(range(3, 8), 8)
        [Node(low=3, high=4), Node(low=4, high=8)]
    """
    return _covering_nodes(run, Node(0, num_parts), split_points(num_parts))


def _covering_nodes(run: range, node: Node, tree: Mapping[Node, int]) -> list[Node]:
    if node.high <= run.start or run.stop <= node.low or node.low == node.high:
        return []
    if run.start <= node.low and node.high <= run.stop:
        return [node]
    middle = tree[node]
    return _covering_nodes(run, Node(node.low, middle), tree) + _covering_nodes(run, Node(middle, node.high), tree)


def _sum_over_ranks(
    own: Sequence[torch.Tensor], world: World, rank_ranges: Sequence[range], num_parts: int
) -> torch.Tensor:
    """Returns the root of the tree. Each rank adds a slice of it up, of its own nodes and those that it gets."""
    if world.size == 1:
        return own[0]
    nodes = [covering_nodes(run, num_parts) for run in rank_ranges]
    counts = [len(each) for each in nodes]
    in_order = [node for each in nodes for node in each]
    length = len(own[0])
    whole = torch.empty_like(own[0])
    for start in range(0, length, _NUMBERS_AT_A_TIME):
        stop = min(start + _NUMBERS_AT_A_TIME, length)
        width = -(-(stop - start) // world.size)
        # What fills the last slice up is thrown away.
        sent = own[0].new_zeros(world.size, len(own), width)
        for rank in range(world.size):
            first, last = start + rank * width, min(start + (rank + 1) * width, stop)
            for i, each in enumerate(own):
                sent[rank, i, : max(0, last - first)] = each[first:last]
        received = world.all_to_all(sent.view(-1), give=len(own) * width, take=[count * width for count in counts])
        sums = dict(zip(in_order, received.split(width), strict=True))  # type: ignore[no-untyped-call]
        whole[start:stop] = world.all_gather(_root(Node(0, num_parts), sums, split_points(num_parts)))[: stop - start]
    return whole


def _root(node: Node, sums: Mapping[Node, torch.Tensor], tree: Mapping[Node, int]) -> torch.Tensor:
    if node in sums:
        return sums[node]
    left = _root(Node(node.low, tree[node]), sums, tree)
    return left.add_(_root(Node(tree[node], node.high), sums, tree))


def _flat_gradient(parameter: torch.Tensor) -> torch.Tensor:
    gradient = parameter.grad
    return (torch.zeros_like(parameter) if gradient is None else gradient).detach().reshape(-1)
