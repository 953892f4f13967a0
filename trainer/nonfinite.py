"""Notices that a gradient is NaN or infinite, without making the device wait, and says where it began."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from .errors import NonFiniteError
from .parallel import local

if TYPE_CHECKING:
    from .trainer import Trainer

_MOST_NAMES = 8


class NonFiniteGuard:
    """Refuses to go on from an update whose gradient is not finite.

    The norm of the whole gradient is the same on every rank, so all ranks refuse together. On a CPU the norm is looked
    at before the optimizer steps. On a GPU that would stall every update: there it is copied aside and looked at when
    it has arrived, some updates later; `settle` waits for it, before anything is saved.
    """

    def __init__(self, trainer: Trainer[Any]) -> None:
        self._trainer = trainer
        self._pending: deque[tuple[int, torch.Tensor, torch.cuda.Event]] = deque()

    def check(self, norm: torch.Tensor) -> torch.Tensor | float:
        """Looks at the norm of the gradient of the update in hand, now or as soon as it is known, and returns it.

        Raises:
            NonFiniteError: it is not finite, or that of an earlier update was not.
        """
        step = self._trainer.progress.step + 1
        if norm.device.type == "cpu":
            if not math.isfinite(value := norm.item()):
                raise NonFiniteError(self._describe(step, value))
            return value
        host = torch.empty((), dtype=norm.dtype, pin_memory=True)
        host.copy_(norm.detach(), non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        self._pending.append((step, host, arrived))
        while self._pending and self._pending[0][2].query():  # type: ignore[no-untyped-call]
            self._look_at(self._pending.popleft())
        return norm

    def settle(self) -> None:
        """Waits for every norm that is still on its way.

        Raises:
            NonFiniteError: one of them is not finite.
        """
        while self._pending:
            pending = self._pending.popleft()
            pending[2].synchronize()
            self._look_at(pending)

    def _look_at(self, pending: tuple[int, torch.Tensor, torch.cuda.Event]) -> None:
        step, host, _ = pending
        if not math.isfinite(value := host.item()):
            raise NonFiniteError(
                f"the norm of the gradient of step {step} is {value}; weights from there on are not saved"
            )

    def _describe(self, step: int, value: float) -> str:
        """Says on which ranks and in which parameters. Every rank must call this, and does: the norm is common."""
        names = [
            f"{name}.{path}"
            for name, model in self._trainer.models.items()
            for path, parameter in model.named_parameters()
            if parameter.grad is not None and not bool(local(parameter.grad).isfinite().all())
        ]
        guilty = {rank: found for rank, found in enumerate(self._trainer.world.gather(names)) if found}
        where = "; ".join(
            f"rank {rank}: {', '.join(found[:_MOST_NAMES])}" + (" and more" if len(found) > _MOST_NAMES else "")
            for rank, found in guilty.items()
        )
        return (
            f"the norm of the gradient of step {step} is {value} ({where or 'the sum of finite gradients overflows'}). "
            "The update was not applied. Look for a division by zero, a log of zero or a learning rate that is too "
            "high; max_grad_norm bounds large gradients"
        )
