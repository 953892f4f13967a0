"""An exponential moving average of the weights: sharded like them, in float32, swapped in for evaluations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..checkpoints.model_state import named_state_tensors
from ..distributed.dtensor import to_dtensor_like, to_full_tensor, to_local
from ..distributed.fsdp import reshard
from ..errors import CheckpointError, ConfigError
from ..private_torch import foreach_lerp_
from .base import Callback

if TYPE_CHECKING:
    from ..trainer import Trainer


class Ema(Callback):
    """Averages the trainable weights of all models: `average = decay * average + (1 - decay) * weight` after updates.

    Each applied update counts once; skipped updates do not count. Each rank averages its own shards, so this works with
    every strategy; half-precision weights are averaged in float32. Buffers and parameters that are frozen at setup
    are not averaged. The averages are in every checkpoint and resume exactly, also on another number of ranks and
    with another strategy.

    During evaluations the models hold the averages. Afterwards the weights are restored bit for bit, also after an
    error. Until then, this needs memory for a second copy of this rank's weights.

    Args:
        decay: factor of the average at each of its updates; >= 0 and < 1.
        update_every: updates of the weights per update of the average.
        start_step: the average starts as a copy of the weights after this update.
        device: where the averages are; by default with the weights. "cpu" saves GPU memory, but each update of the
            averages then waits for the GPU.
        evaluate: whether evaluations use the averages; True for at most one of several `Ema`.

    Raises:
        ConfigError: an argument is invalid, or two `Ema` have evaluate=True.

    Example:
        >>> ema = Ema(decay=0.999)
        >>> trainer = Digits(config, callbacks=[ema])
        >>> result = trainer.fit()
        >>> averages = ema.weights()["model"]
        >>> with ema.applied():  # for code that uses the model itself
        ...     trainer.export("averaged.safetensors")
    """

    def __init__(
        self,
        decay: float = 0.9999,
        *,
        update_every: int = 1,
        start_step: int = 0,
        device: torch.device | str | None = None,
        evaluate: bool = True,
    ) -> None:
        if not 0 <= decay < 1:
            raise ConfigError(f"decay must be >= 0 and < 1, such as 0.999, got {decay!r}")
        for name, value, least in (("update_every", update_every, 1), ("start_step", start_step, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name} must be an integer >= {least}, got {value!r}")
        self.decay, self.update_every, self.start_step, self.evaluate = decay, update_every, start_step, evaluate
        self._device = torch.device(device) if device is not None else None
        self._models: Mapping[str, nn.Module] = {}
        self._wait_for_snapshot: Callable[[], None] | None = None
        self._parameters: dict[tuple[str, str], nn.Parameter] = {}
        self._averages: list[torch.Tensor] = []
        self._has_begun = False

    def on_setup_start(self, trainer: Trainer[Any]) -> None:
        """Check that at most one `Ema` is evaluated.

        Raises:
            ConfigError: there are several.
        """
        if sum(isinstance(each, Ema) and each.evaluate for each in trainer.callbacks) > 1:
            raise ConfigError(
                "several Ema callbacks have evaluate=True, but an evaluation uses one set of weights: "
                "set evaluate=False on all but one"
            )

    @torch.no_grad()
    def on_setup_end(self, trainer: Trainer[Any]) -> None:
        """Allocate the averages."""
        self._models, self._has_begun = trainer.models, False
        self._wait_for_snapshot = trainer.wait_for_snapshot
        self._parameters = _trainable(trainer.models)
        self._averages = [self._new_average(to_local(parameter)) for parameter in self._parameters.values()]

    @torch.no_grad()
    def on_step_start(self, trainer: Trainer[Any]) -> None:
        """Copy the current weights, if the average starts here."""
        if not self._has_begun and trainer.global_step >= self.start_step:
            self._has_begun = True
            if self._wait_for_snapshot is not None:
                self._wait_for_snapshot()
            for average, weight in zip(self._averages, self._weights(), strict=True):
                average.copy_(weight)

    @torch.no_grad()
    def on_step_end(self, trainer: Trainer[Any]) -> None:
        """Update the averages."""
        if not self._has_begun or (trainer.global_step - self.start_step) % self.update_every:
            return
        # Weights of another dtype or device one at a time: a copy of all at once might not fit.
        alike: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        for average, weight in zip(self._averages, self._weights(), strict=True):
            if average.dtype == weight.dtype and average.device == weight.device:
                alike[0].append(average)
                alike[1].append(weight)
            else:
                average.lerp_(weight.to(average), 1 - self.decay)
        if alike[0]:
            foreach_lerp_(*alike, 1 - self.decay)

    def evaluation_context(self, trainer: Trainer[Any]) -> AbstractContextManager[object]:
        """Return a context in which the models hold the averages, if these are evaluated."""
        return self.applied() if self.evaluate else nullcontext()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Swap the averages into the models inside this context. No collectives, so any rank may call this alone.

        Inside, forward passes and exports use the averages. Do not train or save inside. Does nothing before the
        average has started.
        """
        if not self._has_begun:
            yield
            return
        if self._wait_for_snapshot is not None:
            self._wait_for_snapshot()
        with torch.no_grad():
            weights = [weight.clone() for weight in self._weights()]
        try:
            self._write(self._averages)
            yield
        finally:
            self._write(weights)

    @torch.no_grad()
    def weights(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return a copy of each model's full state dict, by model name, with the averages in place of the weights.

        The averages keep their device and dtype. Every rank must call this: sharded tensors are gathered.
        """
        averages = {
            id(parameter): to_dtensor_like(average, parameter)
            for parameter, average in zip(self._parameters.values(), self._averages, strict=True)
            if self._has_begun
        }
        return {
            name: {
                key: to_full_tensor(averages.get(id(tensor), tensor)).clone()
                for key, tensor in named_state_tensors(model)
            }
            for name, model in self._models.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the averages by model and key, sharded like their weights."""
        averages: dict[str, dict[str, torch.Tensor]] = {}
        for ((model, key), parameter), average in zip(self._parameters.items(), self._averages, strict=True):
            averages.setdefault(model, {})[key] = to_dtensor_like(average, parameter)
        return {"has_begun": self._has_begun, "averages": averages}

    def tensors_changed_by_step(self) -> list[torch.Tensor]:
        """Return the averages."""
        return self._averages

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the averages.

        Raises:
            CheckpointError: names or shapes of the parameters differ.
        """
        saved = {
            (model, key): average for model, each in state_dict["averages"].items() for key, average in each.items()
        }
        if differing := sorted(
            f"{model}.{key}"
            for model, key in saved.keys() | self._parameters.keys()
            if (model, key) not in saved
            or (model, key) not in self._parameters
            or saved[model, key].shape != self._parameters[model, key].shape
        ):
            raise CheckpointError(
                "the averages in the checkpoint do not match the trainable parameters; these differ: "
                f"{', '.join(differing[:8])}{' and more' if len(differing) > 8 else ''}"
            )
        for name, average in zip(self._parameters, self._averages, strict=True):
            average.copy_(to_local(saved[name]))
        self._has_begun = state_dict["has_begun"]

    def _weights(self) -> list[torch.Tensor]:
        """Return this rank's shards of the weights. Call under `no_grad`, so that they are not tracked."""
        return [to_local(parameter) for parameter in self._parameters.values()]

    def _new_average(self, weight: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(weight.dtype, torch.float32)
        return torch.zeros_like(weight, dtype=wide, device=self._device or weight.device, requires_grad=False)

    @torch.no_grad()
    def _write(self, values: list[torch.Tensor]) -> None:
        # A forward pass without backward leaves parameters gathered, and the next one would use the stale copy.
        reshard(self._models.values())
        for weight, value in zip(self._weights(), values, strict=True):
            weight.copy_(value)


def _trainable(models: Mapping[str, nn.Module]) -> dict[tuple[str, str], nn.Parameter]:
    """Return the parameters that get gradients, by model and key; a tied one only under its first key."""
    found: dict[int, tuple[tuple[str, str], nn.Parameter]] = {}
    for name, model in models.items():
        for key, tensor in named_state_tensors(model):
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                found.setdefault(id(tensor), ((name, key), tensor))
    return dict(found.values())
