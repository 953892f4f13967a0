"""Training without a subclass: a model, an optimizer and a loss function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .config import InitSignature, TrainerConfig
from .errors import ConfigError, StepError
from .optimizers import adamw, named
from .trainer import Trainer

LossFunction = Callable[[Any, Any], torch.Tensor]


class SupervisedTrainer(Trainer[TrainerConfig]):
    """Trains a given model on pairs of inputs and targets, or on batches from which the model computes its loss.

    A batch is a pair (inputs, targets), or a dict that the model gets as keyword arguments. With `loss_fn`, a dict must
    have "labels" or "targets"; these go to `loss_fn` with the model's output, and not to the model. Without `loss_fn`,
    the model gets the whole dict and must return an object or a dict with a `loss`, as Hugging Face models do.

    Args:
        model: with its weights; those of the main rank are used on every rank. A model in evaluation mode, as Hugging
            Face's are after loading, is put in training mode.
        optimizer: an optimizer over the model's parameters; a function from the trainable parameters to one; or a name
            for `optimizers.named`, such as "SGD". Sharded training (FSDP2) replaces the parameters, so it needs a
            function or a name. By default `optimizers.adamw` with a learning rate of 0.001.
        optimizer_settings: for an optimizer by name, such as `{"lr": 0.1, "momentum": 0.9}`.
        loss_fn: takes (outputs, targets) and returns the mean over the batch.
        scheduler: stepped after every update; or a function that makes one from the optimizer.
        train: the training data, as `Trainer.configure_dataloaders` describes it.
        validation: the validation data.
        config: how to train.
        options: further arguments of `Trainer`.

    Example:
        >>> trainer = SupervisedTrainer(
        ...     model=model,
        ...     optimizer=torch.optim.AdamW(model.parameters()),
        ...     loss_fn=nn.functional.cross_entropy,
        ...     train=loader,
        ...     config=TrainerConfig(max_epochs=1),
        ... )
        >>> trainer.fit().status
        'completed'
    """

    __signature__ = InitSignature()

    def __new__(cls, *unexpected: Any, **_: Any) -> Self:
        """Refuse arguments without names.

        Raises:
            ConfigError: there are some.
        """
        if unexpected:
            raise ConfigError(
                f"{cls.__name__} takes its arguments by name: {cls.__name__}(model=..., loss_fn=..., train=..., "
                "config=...)"
            )
        return super().__new__(cls)

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer] | str | None = None,
        optimizer_settings: Mapping[str, Any] | None = None,
        train: Any,
        loss_fn: LossFunction | None = None,
        scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None,
        validation: Any = None,
        config: TrainerConfig,
        **options: Any,
    ) -> None:
        super().__init__(config, **options)
        if optimizer_settings is not None and not isinstance(optimizer, str):
            raise ConfigError('optimizer_settings needs an optimizer by name, such as optimizer="SGD"')
        self._optimizer_settings = dict(optimizer_settings or {})
        self._given_model = model
        self._given_optimizer = optimizer
        self._given_scheduler = scheduler
        self._given_data = train, validation
        self._loss_fn = loss_fn

    def configure_models(self) -> None:
        """Set the given model, in training mode."""
        self.model = self._given_model
        if not self.model.training:
            self.model.train()

    def configure_optimizers(self) -> None:
        """Set the given optimizer and scheduler, or make them.

        Raises:
            ConfigError: sharding has replaced the parameters of an optimizer that was given ready-made.
        """
        given = self._given_optimizer
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if given is None:
            self.optimizer: Optimizer = adamw(self.model, learning_rate=1e-3)
        elif isinstance(given, str):
            self.optimizer = named(given, self.model, **self._optimizer_settings)
        else:
            self.optimizer = given if isinstance(given, Optimizer) else given(trained)
        held = {parameter for group in self.optimizer.param_groups for parameter in group["params"]}
        if not held & set(self.model.parameters()):
            raise ConfigError(
                "the optimizer holds none of the model's parameters, which sharding replaces: give a function, "
                "such as lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)"
            )
        if (scheduler := self._given_scheduler) is not None:
            self.scheduler = scheduler if isinstance(scheduler, LRScheduler) else scheduler(self.optimizer)

    def configure_dataloaders(self) -> Any:
        """Return the given data."""
        return self._given_data

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Return the loss of a batch.

        Raises:
            StepError: the batch has no targets, or the model returned no loss.
        """
        inputs, targets = _split(batch)
        if self._loss_fn is None and isinstance(batch, Mapping):
            inputs = batch
        if self._loss_fn is not None and targets is None:
            raise StepError(
                f"loss_fn needs targets, and the batch is {_describe(batch)}: give (inputs, targets), or a dict with "
                '"labels" or "targets"'
            )
        outputs = self.model(**inputs) if isinstance(inputs, Mapping) else self.model(inputs)
        if self._loss_fn is not None:
            return {"loss": self._loss_fn(getattr(outputs, "logits", outputs), targets)}
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
        if loss is None:
            raise StepError(
                f"there is no loss_fn, and {type(self.unwrap(self.model)).__name__} returned a "
                f"{type(outputs).__name__} without a loss: give loss_fn, or batches that the model computes a loss from"
            )
        return {"loss": loss}


def _split(batch: Any) -> tuple[Any, Any]:
    """Return (inputs, targets); the targets are None if there are none."""
    if isinstance(batch, Mapping):
        targets = batch.get("labels", batch.get("targets"))
        return {key: value for key, value in batch.items() if key not in ("labels", "targets")}, targets
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    return batch, None


def _describe(batch: Any) -> str:
    if isinstance(batch, (tuple, list)):
        return f"a {type(batch).__name__} of {len(batch)}"
    return f"a {type(batch).__name__} without"
