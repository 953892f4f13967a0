"""Notices that the gradient of an update is NaN or infinite, and decides whether the run goes on without it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from ..config import TrainerConfig
from ..errors import NonFiniteError
from .nonfinite_report import NonFiniteReport


class AsyncScalar:
    """A number on its way from a device to the host."""

    def __init__(self, number: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if number.is_cuda:
            self._host = torch.empty((), dtype=number.dtype, pin_memory=True)
            self._host.copy_(number.detach(), non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._host = number.detach().clone()

    def is_ready(self) -> bool:
        """Whether `wait` would return at once."""
        return self._event is None or self._event.query()  # type: ignore[no-untyped-call]

    def wait(self) -> float:
        """Returns the number. Waits for what the device had to do before it, and for nothing that it got since."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.item()


def can_skip(optimizer: Optimizer) -> bool:
    """Whether an optimizer can be told on the device to leave everything as it is: torch's fused ones can."""
    return getattr(optimizer, "_step_supports_amp_scaling", False) and all(
        group.get("fused") for group in optimizer.param_groups
    )


@contextmanager
def skipping(optimizer: Any, not_finite: torch.Tensor) -> Iterator[None]:
    """Has the step of a fused optimizer do nothing if `not_finite`, a float32 tensor of one element, is not zero.

    Source: `torch.amp.GradScaler.step` hands the same two attributes to the optimizers that understand them.
    """
    optimizer.grad_scale, optimizer.found_inf = None, not_finite
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf


class NonFiniteGuard:
    """Keeps an update whose gradient is not finite from becoming part of the run.

    The norm of the whole gradient is the same on every rank, so all ranks decide alike without asking one another.

    Under the policy "raise" the guard `watch`es: the norm is looked at when it has arrived, some updates later, and no
    update waits for it; `check_pending` waits, before anything is saved. Otherwise each norm is checked before the next
    update, and `count_rejected` raises where the run cannot continue.

    Args:
        config: its policy and its bounds.
        sees_every_norm: whether each norm is looked at before the next update, whatever the policy.

    Attributes:
        waits: whether the verdict on an update is needed before the next one begins.
        skipped, retried: updates that were not applied, and those that were tried again, over the whole run.
    """

    def __init__(self, config: TrainerConfig, *, sees_every_norm: bool) -> None:
        self._policy = config.non_finite
        self._most, self._most_in_total = config.max_non_finite, config.max_non_finite_total
        self.needs_norm_now = sees_every_norm or self._policy != "raise"
        self.retries = self._policy == "retry"
        self.skipped = self.retried = 0
        self._in_a_row = self._total = 0
        self._pending: deque[tuple[int, AsyncScalar, NonFiniteReport]] = deque()

    def watch(self, step: int, arrival: AsyncScalar, report: NonFiniteReport) -> None:
        """Takes note of the norm of an update that is applied whatever it is, and looks at those that have arrived.

        Raises:
            NonFiniteError: one of them is not finite.
        """
        self._pending.append((step, arrival, report))
        while self._pending and self._pending[0][1].is_ready():
            self._check(*self._pending.popleft())

    def check_pending(self) -> None:
        """Waits for every norm that is still on its way.

        Raises:
            NonFiniteError: one of them is not finite.
        """
        while self._pending:
            self._check(*self._pending.popleft())

    def count_rejected(self, step: int, norm: float, report: NonFiniteReport) -> None:
        """Counts an update whose gradient is not finite and which has not been applied. Every rank must call this.

        Raises:
            NonFiniteError: by the policy, or because there have been too many.
        """
        self._in_a_row += 1
        self._total += 1
        if self._policy != "raise" and self._in_a_row <= self._most and self._total <= self._most_in_total:
            return
        what = f"the norm of the gradient of step {step} is {norm}"
        if self._policy != "raise" and self._in_a_row > self._most:
            what += f", for the {_ordinal(self._in_a_row)} time in a row (max_non_finite={self._most})"
        elif self._policy != "raise":
            what += f", for the {_ordinal(self._total)} time (max_non_finite_total={self._most_in_total})"
        raise NonFiniteError(
            f"{what}: {report.describe()}. The update was not applied. Look for a division by zero, a log of zero or "
            "a learning rate that is too high; max_grad_norm bounds large gradients"
        )

    def applied(self) -> None:
        """Ends a row: an update was applied, and nothing of it refused."""
        self._in_a_row = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the counts."""
        return {
            "skipped": self.skipped,
            "retried": self.retried,
            "in_a_row": self._in_a_row,
            "total": self._total,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes them over, and forgets the norms that are still on their way: of updates that are undone."""
        self._pending.clear()
        self.skipped, self.retried = state["skipped"], state["retried"]
        self._in_a_row, self._total = state["in_a_row"], state["total"]

    def _check(self, step: int, arrival: AsyncScalar, report: NonFiniteReport) -> None:
        if not math.isfinite(norm := arrival.wait()):
            # Ranks may be at different updates, so nobody asks the others.
            raise NonFiniteError(
                f"the norm of the gradient of step {step} is {norm}: {report.describe_this_rank()}; weights from there "
                "on are not saved"
            )


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
