"""Log histograms of parameters and gradients."""

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
    """Logs histograms of parameters and gradients to the trackers that support them: TensorBoard and wandb.

    Gradients are reduced over all ranks and not yet clipped; parameters are those after the update. Every element
    counts once, with every strategy. Updates at multiples of `every` wait for the device and the other ranks; others
    cost nothing.

    Args:
        every: interval, in steps.
        patterns: shell patterns over full names, such as "model.blocks.0.*", that select parameters.
        parameters: whether to log parameters, as `parameters/<name>`.
        gradients: whether to log gradients, as `gradients/<name>`. If an update steps several optimizers, the last
            gradient of each parameter.
        bins: number of bins per histogram.

    Raises:
        ConfigError: an argument is invalid; or, before the first step, a pattern matches no parameter.

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
            raise ConfigError(f'every must be in steps, such as "500 steps", got {self._every}')
        if isinstance(patterns, str) or not patterns:
            raise ConfigError(f'patterns must be a list of patterns, such as ["*.weight"], got {patterns!r}')
        if not isinstance(bins, int) or not 2 <= bins <= 512:
            raise ConfigError(f"bins must be an integer from 2 to 512, got {bins!r}")
        if not (parameters or gradients):
            raise ConfigError("Histograms has parameters=False and gradients=False: set one of them")
        self._patterns, self._of_parameters, self._of_gradients, self._bins = patterns, parameters, gradients, bins
        self._parameters: dict[str, torch.Tensor] = {}
        self._gradients: dict[str, Histogram] = {}

    def on_setup_end(self, trainer: Trainer[Any]) -> None:
        """Find the parameters that the patterns select.

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
                    f"Histograms: {pattern!r} matches no parameter; the parameters are {', '.join(list(names)[:8])}"
                    f"{' and more' if len(names) > 8 else ''}"
                )
        self._parameters = {
            name: tensor
            for name, tensor in names.items()
            if any(fnmatchcase(name, pattern) for pattern in self._patterns)
        }

    def on_gradients_ready(self, trainer: Trainer[Any]) -> None:
        """Compute the histograms of gradients, if due."""
        if self._of_gradients and (trainer.global_step + 1) % int(self._every.amount) == 0:
            own = trainer.parameters_being_stepped
            # Same names on every rank: with FSDP, ranks that have not used a parameter have no gradient of it.
            gradients = {
                f"gradients/{name}": tensor.grad if tensor.grad is not None else torch.empty(0, device=trainer.device)
                for name, tensor in self._parameters.items()
                if tensor in own
            }
            self._gradients |= histograms(gradients, trainer.world, bins=self._bins)

    def on_step_end(self, trainer: Trainer[Any]) -> None:
        """Compute the histograms of parameters, and log both kinds."""
        if trainer.global_step % int(self._every.amount) == 0:
            found, self._gradients = self._gradients, {}
            if self._of_parameters:
                parameters = {f"parameters/{name}": tensor for name, tensor in self._parameters.items()}
                found |= histograms(parameters, trainer.world, bins=self._bins)
            trainer.log_histograms(found)

    def on_step_skipped(self, trainer: Trainer[Any], reason: str) -> None:
        """Drop the histograms of the skipped update."""
        self._gradients = {}
