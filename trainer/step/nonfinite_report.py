"""Reports on non-finite gradients: from which ranks, rows and losses they came, and in which parameters they are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..data.protocols import GlobalBatch, HasRowIds
from ..data.tree import map_tensors
from ..distributed.dtensor import to_local
from ..distributed.world import World
from .gradients import dense_values, named_parameters

_MOST_NAMES = 8
_MOST_ROWS = 16


@dataclass(slots=True)
class RankReport:
    """The report of one rank.

    Attributes:
        losses: non-finite losses, by the index of their micro-batch.
        inputs: indices of micro-batches with non-finite values in their data.
        parameters: names of parameters whose gradient, or this rank's shard of it, is not finite; if gradients may be
            gone, also of parameters that are not finite themselves.
        rows: ids of the rows in these micro-batches. If there are none, of all micro-batches, or of none if gradients
            may be gone; empty if the data has no row ids.
    """

    losses: dict[int, float] = field(default_factory=dict)
    inputs: list[int] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    rows: list[Any] = field(default_factory=list)


class NonFiniteReport:
    """The data for a report on one update, in case its gradient is not finite; inspected only then.

    Args:
        world: the ranks.
        models: whose parameters have the gradients.
        batch: this rank's part of the global batch.
        losses: for each backward pass, the index of its micro-batch, the loss and its weight.
    """

    def __init__(
        self,
        world: World,
        models: Mapping[str, nn.Module],
        batch: GlobalBatch,
        losses: Sequence[tuple[int, torch.Tensor, Any]],
    ) -> None:
        self._world, self._models, self._batch, self._losses = world, models, batch, losses

    def describe(self) -> str:
        """Return a description over all ranks. Every rank must call this, before gradients are cleared."""
        return format_reports(self._world.all_gather_object(self._inspect(with_gradients=True)))

    def describe_this_rank(self) -> str:
        """Return a description for this rank; the update may have been applied and followed by others."""
        found = self._inspect(with_gradients=False)
        spoilt = f"; not finite by now: {_first(found.parameters, _MOST_NAMES)}" if found.parameters else ""
        return f"on rank {self._world.rank}, {_format_report(found)}{spoilt}"

    def _inspect(self, *, with_gradients: bool) -> RankReport:
        found = RankReport()
        for number, loss, counts in self._losses:
            # A micro-batch without any token has NaN as its mean loss, but weight 0.
            if float(counts) and not math.isfinite(value := float(loss.detach())):
                found.losses[number] = value
        for number, micro_batch in enumerate(self._batch.micro_batches):
            if not _is_finite(micro_batch):
                found.inputs.append(number)
        for name, parameter in named_parameters(self._models):
            looked_at = [parameter.grad] if with_gradients else [parameter.grad, parameter.detach()]
            if not all(bool(dense_values(to_local(each)).isfinite().all()) for each in looked_at if each is not None):
                found.parameters.append(name)
        if isinstance(self._batch, HasRowIds) and (rows := self._batch.row_ids()):
            # Without gradients, these rows are no more suspect than the weights.
            guilty = sorted({*found.losses, *found.inputs}) or (range(len(rows)) if with_gradients else ())
            found.rows = [row for number in guilty for row in rows[number]]
        return found


def format_reports(reports: Sequence[RankReport]) -> str:
    """Format the reports of all ranks as one sentence, with at most 8 parameters, and 16 rows of each rank."""
    names = list(dict.fromkeys(name for each in reports for name in each.parameters))
    if not names:
        return "the sum of finite gradients overflows"
    guilty = {rank: each for rank, each in enumerate(reports) if each.losses or each.inputs}
    if not guilty:
        # Under DDP gradients are already reduced, and equal on every rank.
        guilty = {rank: each for rank, each in enumerate(reports) if each.parameters}
    where = "; ".join(f"rank {rank}: {_format_report(each)}" for rank, each in guilty.items())
    return f"{where}; in the gradient of {_first(names, _MOST_NAMES)}"


def _format_report(found: RankReport) -> str:
    what = [f"the loss of micro-batch {number + 1} is {loss}" for number, loss in found.losses.items()][:_MOST_NAMES]
    if found.inputs:
        what.append(f"the data of micro-batch {', '.join(str(number + 1) for number in found.inputs)} is not finite")
    what = what or ["every loss is finite"]
    if found.rows:
        what.append(f"rows {_first(found.rows, _MOST_ROWS)}")
    return ", ".join(what)


def _first(things: Sequence[Any], most: int) -> str:
    return ", ".join(map(str, things[:most])) + (f" and {len(things) - most} more" if len(things) > most else "")


def _is_finite(batch: Any) -> bool:
    finite = True

    def look(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal finite
        finite = finite and (not tensor.is_floating_point() or bool(tensor.isfinite().all()))
        return tensor

    map_tensors(look, batch)
    return finite
