"""Which parameters have the largest gradients, every so often."""

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
    """Adds the largest norms of single parameters' gradients to the records, as `grad_norm/<parameter>`.

    They are those of the whole gradient over all ranks, before clipping, at the last update of its own. At the others
    it does nothing; at its own it waits for the device and, where parameters are sharded, for the other ranks. Norms of
    groups in every update are `TrainerConfig.grad_norm_groups`.

    Args:
        every: time between two, in steps.
        top: how many of the largest.

    Attributes:
        norms: of the last update that was looked at, by name, the largest first.

    Raises:
        ConfigError: an argument makes no sense.

    Example:
        >>> trainer = Digits(config, callbacks=[GradientNorms(every="500 steps", top=5)])
    """

    def __init__(self, *, every: Duration | str | int, top: int = 8) -> None:
        self._every = Duration.parse(every)
        if self._every.unit != "steps":
            raise ConfigError(f'every counts steps, such as "500 steps", not {self._every}')
        if not isinstance(top, int) or isinstance(top, bool) or top < 1:
            raise ConfigError(f"top is a whole number from 1, not {top!r}")
        self._top = top
        self._fresh = False
        self._step: int | None = None
        self.norms: dict[str, float] = {}

    def on_setup_end(self, trainer: Trainer[Any]) -> None:
        """Joins the records."""
        trainer.add_metric_source(self._tell)

    def on_gradients_ready(self, trainer: Trainer[Any]) -> None:
        """Measures, in an update that it is due at."""
        if (trainer.global_step + 1) % int(self._every.amount):
            return
        own = trainer.parameters_being_stepped
        gradients = {name: p.grad for name, p in named_parameters(trainer.models) if p.grad is not None and p in own}
        if not gradients:
            return  # the update itself says what is wrong
        measured = torch.stack([total_norm([each]).float() for each in gradients.values()]).tolist()
        # Each optimizer has its turn in one update.
        norms = self.norms if self._step == trainer.global_step else {}
        norms = {**norms, **dict(zip(gradients, measured, strict=True))}
        self.norms = dict(sorted(norms.items(), key=lambda pair: -pair[1])[: self._top])
        self._step, self._fresh = trainer.global_step, True

    def state_dict(self) -> dict[str, Any]:
        """Returns what no record has told yet."""
        return {"norms": self.norms} if self._fresh else {}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Takes it over."""
        self.norms, self._fresh = dict(state_dict["norms"]), True

    def _tell(self, record: Mapping[str, float]) -> dict[str, float]:
        fresh, self._fresh = self._fresh, False
        return {f"grad_norm/{name}": norm for name, norm in self.norms.items()} if fresh else {}
