"""Summarise models: parameters, trained parameters, and their memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..distributed.dtensor import unwrap
from ..metrics.units import human_bytes
from .base import Callback

if TYPE_CHECKING:
    from ..trainer import Trainer


class ModelSummary(Callback):
    """Prints a table of every model when training starts.

    Attributes:
        text: the printed tables.

    Example:
        >>> trainer = Digits(config, callbacks=[ModelSummary()])
    """

    text: str = ""

    def on_fit_start(self, trainer: Trainer[Any]) -> None:
        """Print the tables."""
        tables = [model_summary(model, name=name) for name, model in trainer.models.items()]
        self.text = "\n\n".join(tables)
        trainer.print(self.text)


def model_summary(model: nn.Module, *, name: str = "model") -> str:
    """Return a table of a model's top-level modules: class, parameters, trained parameters, bytes with buffers.

    Counts cover the full model, even if it is sharded or on the meta device. A weight shared by several modules counts
    in the first of them.

    Args:
        model: may be wrapped and compiled.
        name: title of the table.

    Example:
        >>> print(model_summary(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))))
        model  class       parameters  trained  bytes
        0      Linear              20       20   80 B
        1      Linear               5        5   20 B
        total  Sequential          25       25  100 B
    """
    module = unwrap(model)
    seen: set[int] = set()
    rows = [_row("(itself)", module, [*module.parameters(recurse=False), *module.buffers(recurse=False)], seen)]
    rows = rows if rows[0].bytes else []
    for child_name, child in module.named_children():
        rows.append(_row(child_name, unwrap(child), [*child.parameters(), *child.buffers()], seen))
    sums = (sum(getattr(row, column) for row in rows) for column in ("parameters", "trained", "bytes"))
    rows.append(_Row("total", _kind(module), *sums))
    cells = [(name, "class", "parameters", "trained", "bytes")]
    cells += [(r.name, r.kind, f"{r.parameters:,}", f"{r.trained:,}", human_bytes(r.bytes)) for r in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        f"{line[0]:{widths[0]}}  {line[1]:{widths[1]}}  "
        + "  ".join(f"{cell:>{width}}" for cell, width in zip(line[2:], widths[2:], strict=True))
        for line in cells
    )


class _Row(NamedTuple):
    name: str
    kind: str
    parameters: int
    trained: int
    bytes: int


def _row(name: str, module: nn.Module, tensors: Iterable[torch.Tensor], seen: set[int]) -> _Row:
    """Count the tensors that are not in `seen`, sharded ones at full size, and add them to it."""
    new = {id(each): each for each in tensors if id(each) not in seen}.values()
    seen.update(map(id, new))
    parameters = [each for each in new if isinstance(each, nn.Parameter)]
    return _Row(
        name,
        _kind(module),
        sum(each.numel() for each in parameters),
        sum(each.numel() for each in parameters if each.requires_grad),
        sum(each.numel() * each.element_size() for each in new),
    )


def _kind(module: nn.Module) -> str:
    name = type(module).__name__
    # FSDP2 replaces the class of each module that it shards by a subclass, FSDP<name>.
    return name.removeprefix("FSDP") if isinstance(module, FSDPModule) else name
