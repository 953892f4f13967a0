"""The guard against NaN and infinite gradients: raises, or counts skipped and retried updates."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..config import TrainerConfig
from ..errors import NonFiniteError
from .nonfinite_report import NonFiniteReport


class AsyncScalar:
    """A number that is being copied from a device to the host."""

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
        """Return whether `wait` would return immediately."""
        return self._event is None or self._event.query()  # type: ignore[no-untyped-call]

    def wait(self) -> float:
        """Return the number. Waits for device work queued before it, but not for later work."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.item()


@contextmanager
def skipping(optimizer: Any, not_finite: torch.Tensor) -> Iterator[None]:
    """Make the step of a fused optimizer do nothing if `not_finite`, a float32 tensor with one element, is not zero.

    Source: `torch.amp.GradScaler.step` sets the same two attributes on such optimizers.
    """
    optimizer.grad_scale, optimizer.found_inf = None, not_finite
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf


class NonFiniteGuard:
    """Raises on non-finite gradients, or counts the updates that were rejected because of them.

    The norm of the whole gradient is equal on every rank, so all ranks decide alike without communication.

    With the policy "raise", `watch` checks each norm when its copy has arrived on the host, some updates later, so that
    no update waits for it; `check_pending` waits for all, before a save. With other policies each norm is checked
    before the next update, and `count_rejected` raises if there are too many rejected updates.

    Args:
        config: its policy and limits.
        sees_every_norm: whether each norm is checked before the next update, whatever the policy.

    Attributes:
        needs_norm_now: whether the norm is needed before the next update.
        retries: whether the policy is "retry".
        skipped, retried: updates that were not applied, and those that were repeated, over the whole run.
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
        """Add the norm of an applied update, and check the norms that have arrived.

        Raises:
            NonFiniteError: a norm is not finite.
        """
        self._pending.append((step, arrival, report))
        while self._pending and self._pending[0][1].is_ready():
            self._check(*self._pending.popleft())

    def check_pending(self) -> None:
        """Wait for all pending norms and check them.

        Raises:
            NonFiniteError: a norm is not finite.
        """
        while self._pending:
            self._check(*self._pending.popleft())

    def count_rejected(self, step: int, norm: float, report: NonFiniteReport) -> None:
        """Count an update that was not applied because of its gradient. Every rank must call this.

        Raises:
            NonFiniteError: the policy is "raise", or there have been too many.
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
        """Reset the count of consecutive rejected updates, after one that was applied."""
        self._in_a_row = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the counters."""
        return {
            "skipped": self.skipped,
            "retried": self.retried,
            "in_a_row": self._in_a_row,
            "total": self._total,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counters, and drop pending norms, whose updates are undone."""
        self._pending.clear()
        self.skipped, self.retried = state["skipped"], state["retried"]
        self._in_a_row, self._total = state["in_a_row"], state["total"]

    def _check(self, step: int, arrival: AsyncScalar, report: NonFiniteReport) -> None:
        if not math.isfinite(norm := arrival.wait()):
            # Without collectives, since ranks may be at different updates.
            raise NonFiniteError(
                f"the norm of the gradient of step {step} is {norm}: {report.describe_this_rank()}; later weights are "
                "not saved"
            )


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
