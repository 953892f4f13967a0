"""Show samples of the model's output during training: generated text or images."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoints.rng import preserve_rng
from ..errors import ConfigError
from ..loop.progress import Duration, Schedule
from .base import Callback

if TYPE_CHECKING:
    from ..trainer import Trainer


class Samples(Callback):
    """Calls a function `(trainer)` at intervals, and shows its result: a text, or texts and images by name.

    Texts are printed and logged to the trackers that support them (TensorBoard, wandb, MLflow); images, [channels,
    height, width], are logged to the trackers. The models are in evaluation mode, without gradients, with the averages
    of an `Ema` that is evaluated. The random generators are restored afterwards, so training is the same with and
    without samples; the time does not count in the throughput.

    Every rank calls the function, because a sharded model needs all of them; only rank 0's result is shown. An error
    causes one warning, and training continues. If only some ranks fail, in the middle of a forward pass, the others
    wait for them forever, so all ranks should compute the same.

    Args:
        function: returns a text, a dict of texts and images by name, or None to show nothing.
        every: interval, in steps or epochs.
        name: name of a text that the function returns without one.

    Raises:
        ConfigError: `every` is wall time, which differs between ranks, or `function` is not callable.

    Example:
        >>> def guess(trainer):
        ...     return f"for a blank image it predicts {trainer.model(torch.zeros(1, 64)).argmax().item()}"
        >>> trainer = Digits(config, callbacks=[Samples(guess, every="1000 steps")])
    """

    def __init__(
        self, function: Callable[[Trainer[Any]], Any], *, every: Duration | str | int, name: str = "samples"
    ) -> None:
        duration = Duration.parse(every)
        if duration.unit == "seconds":
            raise ConfigError(f"every must be in steps or epochs, got {duration}: wall time differs between ranks")
        if not callable(function):
            raise ConfigError(f"function must be callable with the trainer, got {function!r:.80}")
        self._function, self._name = function, name
        self._schedule = Schedule(duration)
        self._has_warned = False

    def on_step_end(self, trainer: Trainer[Any]) -> None:
        """Sample, if due by steps."""
        if self._schedule.due(trainer.progress, ended="steps"):
            self._sample(trainer)

    def on_epoch_end(self, trainer: Trainer[Any], metrics: Mapping[str, float]) -> None:
        """Sample, if due by epochs."""
        if trainer.progress.step_in_epoch == 0 and self._schedule.due(trainer.progress, ended="epochs"):
            self._sample(trainer)

    def _sample(self, trainer: Trainer[Any]) -> None:
        with preserve_rng():
            try:
                with trainer.evaluating():
                    made = self._function(trainer)
                if trainer.world.is_main:
                    self._show(trainer, made)
            except Exception as error:
                self._warn(error)

    def _show(self, trainer: Trainer[Any], made: Any) -> None:
        made = {} if made is None else {self._name: made} if isinstance(made, str) else dict(made)
        texts = {name: each for name, each in made.items() if isinstance(each, str)}
        images = {name: each for name, each in made.items() if isinstance(each, torch.Tensor)}
        if strange := [name for name in made if name not in texts and name not in images]:
            raise TypeError(f"{strange[0]!r} must be a text or an image tensor, got {type(made[strange[0]]).__name__}")
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
                f"sampling with {name} failed; training continues without samples: {type(error).__name__}: {error}",
                stacklevel=3,
            )
