"""How parameters and gradients are spread, every so often, for the trackers."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoints.model_state import named_state_tensors
from ..errors import ConfigError
from ..loop.progress import Duration
from ..metrics.histogram import Histogram, histograms
from .base import Callback

if TYPE_CHECKING:
    from ..trainer import Trainer


class Histograms(Callback):
    """Gives histograms of parameters and gradients to the trackers that take them: TensorBoard and wandb.

    Gradients are those of all ranks, before clipping; parameters are those after the update. Every element counts once,
    under every strategy. At updates that are not its own it does nothing; at its own it waits for the device and for
    the other ranks.

    Args:
        every: time between two, in steps.
        patterns: shell patterns over whole names, such as "model.blocks.0.*": a parameter that one matches is taken.
        parameters: whether to take parameters, as `parameters/<name>`.
        gradients: whether to take gradients, as `gradients/<name>`. Where a step moves several optimizers one after the
            other, those of the last time that a parameter had one.
        bins: in one histogram.

    Raises:
        ConfigError: an argument makes no sense; or, before the first step, a pattern matches no parameter.

    Example:
        >>> trainer = Digits(config, callbacks=[Histograms(every="500 steps", patterns=["model.head.*"])])
    """

    def __init__(
        self,
        *,
        every: Duration | str | int,
        patterns: Sequence[str] = ("*",),
        parameters: bool = True,
        gradients: bool = True,
        bins: int = 64,
    ) -> None:
        self._every = Duration.parse(every)
        if self._every.unit != "steps":
            raise ConfigError(f'every counts steps, such as "500 steps", not {self._every}')
        if isinstance(patterns, str) or not patterns:
            raise ConfigError(f'patterns is a list of patterns, such as ["*.weight"], not {patterns!r}')
        if not isinstance(bins, int) or not 2 <= bins <= 512:
            raise ConfigError(f"bins is a whole number from 2 to 512, not {bins!r}")
        if not (parameters or gradients):
            raise ConfigError("Histograms of neither parameters nor gradients are none: take one of them")
        self._patterns, self._of_parameters, self._of_gradients, self._bins = patterns, parameters, gradients, bins
        self._parameters: dict[str, torch.Tensor] = {}
        self._gradients: dict[str, Histogram] = {}

    def on_setup_end(self, trainer: Trainer[Any]) -> None:
        """Looks for the parameters.

        Raises:
            ConfigError: a pattern matches none.
        """
        names = {
            f"{model}.{key}": tensor
            for model, module in trainer.models.items()
            for key, tensor in named_state_tensors(module)
            if isinstance(tensor, torch.nn.Parameter)
        }
        for pattern in self._patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(
                    f"Histograms: {pattern!r} matches no parameter; there is {', '.join(list(names)[:8])}"
                    f"{' and more' if len(names) > 8 else ''}"
                )
        self._parameters = {
            name: tensor
            for name, tensor in names.items()
            if any(fnmatchcase(name, pattern) for pattern in self._patterns)
        }

    def on_gradients_ready(self, trainer: Trainer[Any]) -> None:
        """Counts the gradients of an update that it is due at."""
        if self._of_gradients and (trainer.global_step + 1) % int(self._every.amount) == 0:
            own = trainer.parameters_being_stepped
            # The same names on every rank: FSDP leaves a gradient out on the ranks that have not used the parameter.
            gradients = {
                f"gradients/{name}": tensor.grad if tensor.grad is not None else torch.empty(0, device=trainer.device)
                for name, tensor in self._parameters.items()
                if tensor in own
            }
            self._gradients |= histograms(gradients, trainer.world, bins=self._bins)

    def on_step_end(self, trainer: Trainer[Any]) -> None:
        """Counts the parameters, and gives all of it to the trackers."""
        if trainer.global_step % int(self._every.amount) == 0:
            found, self._gradients = self._gradients, {}
            if self._of_parameters:
                parameters = {f"parameters/{name}": tensor for name, tensor in self._parameters.items()}
                found |= histograms(parameters, trainer.world, bins=self._bins)
            trainer.log_histograms(found)

    def on_step_skipped(self, trainer: Trainer[Any], reason: str) -> None:
        """Forgets the gradients of an update that was not."""
        self._gradients = {}
