"""Log the parameters with the largest gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ConfigError
from ..loop.progress import Duration
from ..step.gradients import named_parameters, total_norm
from .base import Callback

if TYPE_CHECKING:
    from ..trainer import Trainer


class GradientNorms(Callback):
    """Adds the largest gradient norms of single parameters to the records, as `grad_norm/<parameter>`.

    Norms of the full gradient over all ranks, before clipping, at the last update that is a multiple of `every`. Such
    an update waits for the device and, if parameters are sharded, for the other ranks; others cost nothing.
    `TrainerConfig.grad_norm_groups` logs norms of groups in every record instead.

    Args:
        every: interval, in steps.
        top: number of norms to log.

    Attributes:
        norms: the last measured norms, by parameter name, largest first.

    Raises:
        ConfigError: an argument is invalid.

    Example:
        >>> trainer = Digits(config, callbacks=[GradientNorms(every="500 steps", top=5)])
    """

    def __init__(self, *, every: Duration | str | int, top: int = 8) -> None:
        self._every = Duration.parse(every)
        if self._every.unit != "steps":
            raise ConfigError(f'every must be in steps, such as "500 steps", got {self._every}')
        if not isinstance(top, int) or isinstance(top, bool) or top < 1:
            raise ConfigError(f"top must be an integer >= 1, got {top!r}")
        self._top = top
        self._fresh = False
        self._step: int | None = None
        self.norms: dict[str, float] = {}

    def on_setup_end(self, trainer: Trainer[Any]) -> None:
        """Register as a metric source."""
        trainer.add_metric_source(self._unlogged_norms)

    def on_gradients_ready(self, trainer: Trainer[Any]) -> None:
        """Measure the norms, if due."""
        if (trainer.global_step + 1) % int(self._every.amount):
            return
        own = trainer.parameters_being_stepped
        gradients = {name: p.grad for name, p in named_parameters(trainer.models) if p.grad is not None and p in own}
        if not gradients:
            return  # the update itself raises
        measured = torch.stack([total_norm([each]).float() for each in gradients.values()]).tolist()
        # With several optimizers this is called once for each, within one update.
        norms = self.norms if self._step == trainer.global_step else {}
        norms = {**norms, **dict(zip(gradients, measured, strict=True))}
        self.norms = dict(sorted(norms.items(), key=lambda pair: -pair[1])[: self._top])
        self._step, self._fresh = trainer.global_step, True

    def state_dict(self) -> dict[str, Any]:
        """Return the norms that are not logged yet."""
        return {"norms": self.norms} if self._fresh else {}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore them."""
        self.norms, self._fresh = dict(state_dict["norms"]), True

    def _unlogged_norms(self, record: Mapping[str, float]) -> dict[str, float]:
        fresh, self._fresh = self._fresh, False
        return {f"grad_norm/{name}": norm for name, norm in self.norms.items()} if fresh else {}
