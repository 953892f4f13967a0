"""Lets a person see what the model makes, every so often: generated text or images, and never an end of the run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoints.rng import RngState
from ..errors import ConfigError
from ..loop.progress import Duration, Schedule
from .base import Callback

if TYPE_CHECKING:
    from ..trainer import Trainer


class Samples(Callback):
    """Calls a function `(trainer)` every so often, and shows what it returns: one text, or texts and images by name.

    Texts are printed and go to the trackers that take them (TensorBoard, wandb, MLflow); images, [channels, height,
    width], go to the trackers. The models are as in an evaluation: in evaluation mode, without gradients, with the
    averages of an `Ema` that is evaluated. Random numbers are drawn from a copy of the generators, so that the training
    is the same with and without samples, and the time is left out of the throughput.

    Every rank calls the function, because a sharded model needs all of them; what the main rank's returns is shown. An
    error in it costs one warning, and training goes on. A rank that fails in the middle of a forward pass while the
    others go on leaves them waiting, though: let all ranks compute the same.

    Args:
        function: returns a text, a dict of texts and images by name, or None for nothing to show.
        every: time between two, in steps or epochs.
        name: of a text that comes without one.

    Raises:
        ConfigError: `every` is wall time, by which ranks would differ, or `function` cannot be called.

    Example:
        >>> def guess(trainer):
        ...     return f"of nothing it makes {trainer.model(torch.zeros(1, 64)).argmax().item()}"
        >>> trainer = Digits(config, callbacks=[Samples(guess, every="1000 steps")])
    """

    def __init__(
        self, function: Callable[[Trainer[Any]], Any], *, every: Duration | str | int, name: str = "samples"
    ) -> None:
        duration = Duration.parse(every)
        if duration.unit == "seconds":
            raise ConfigError(f"every counts steps or epochs, not {duration}: ranks would sample at other steps")
        if not callable(function):
            raise ConfigError(f"function is called with the trainer and returns what to show; it is {function!r:.80}")
        self._function, self._name = function, name
        self._schedule = Schedule(duration)
        self._has_warned = False

    def on_step_end(self, trainer: Trainer[Any]) -> None:
        """Samples, where steps are counted."""
        if self._schedule.due(trainer.progress, ended="steps"):
            self._sample(trainer)

    def on_epoch_end(self, trainer: Trainer[Any], metrics: Mapping[str, float]) -> None:
        """Samples, where epochs are counted."""
        if trainer.progress.step_in_epoch == 0 and self._schedule.due(trainer.progress, ended="epochs"):
            self._sample(trainer)

    def _sample(self, trainer: Trainer[Any]) -> None:
        generators = RngState()
        before = generators.state_dict()
        try:
            with trainer.evaluating():
                made = self._function(trainer)
            if trainer.world.is_main:
                self._show(trainer, made)
        except Exception as error:
            self._warn(error)
        finally:
            generators.load_state_dict(before)

    def _show(self, trainer: Trainer[Any], made: Any) -> None:
        made = {} if made is None else {self._name: made} if isinstance(made, str) else dict(made)
        texts = {name: each for name, each in made.items() if isinstance(each, str)}
        images = {name: each for name, each in made.items() if isinstance(each, torch.Tensor)}
        if strange := [name for name in made if name not in texts and name not in images]:
            raise TypeError(
                f"{strange[0]!r} is {type(made[strange[0]]).__name__}, and neither a text nor an image tensor"
            )
        for name, text in texts.items():
            trainer.print(f"{name} after step {trainer.global_step:,}: {text}")
        if texts:
            trainer.log_text(texts)
        if images:
            trainer.log_images(images)

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            name = getattr(self._function, "__qualname__", repr(self._function))
            warnings.warn(
                f"the samples of {name} failed, and training goes on without them: {type(error).__name__}: {error}",
                stacklevel=3,
            )
