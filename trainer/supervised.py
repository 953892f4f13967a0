"""Training without a subclass: a model, an optimizer and a loss function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .config import TrainerConfig
from .errors import ConfigError, StepError
from .optimizers import adamw, named
from .trainer import Trainer

LossFunction = Callable[[Any, Any], torch.Tensor]


class SupervisedTrainer(Trainer[TrainerConfig]):
    """Trains a ready-made model on pairs of inputs and targets, or on batches that the model takes its loss from.

    A batch is a pair (inputs, targets); or a dict, which the model gets as keyword arguments. With `loss_fn` a dict
    must have "labels" or "targets", which `loss_fn` gets with the model's output, and the model does not. Without one
    the model gets all of it, and must return an object or a dict with a `loss`, as those of Hugging Face do.

    Args:
        model: with its weights; the main rank's are taken on every rank. One that is in evaluation mode as a whole,
            as Hugging Face's are when they have been loaded, is put in training mode.
        optimizer: one over the model's parameters, or a function that makes one from those that are not frozen.
            Sharded training (FSDP2) replaces the parameters, so it needs the function, or a name for
            `optimizers.named`, such as "SGD". By default `optimizers.adamw` with a learning rate of 0.001.
        optimizer_settings: of an optimizer by name: `{"lr": 0.1, "momentum": 0.9}`.
        loss_fn: takes (outputs, targets) and returns the mean over the batch.
        scheduler: moves after every update; or a function that makes one from the optimizer.
        train: the training data, as `Trainer.configure_dataloaders` describes it.
        validation: the validation data.
        config: how to train.
        options: what `Trainer` takes besides.

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
            raise ConfigError('optimizer_settings are those of an optimizer by name, such as optimizer="SGD"')
        self._optimizer_settings = dict(optimizer_settings or {})
        self._given_model = model
        self._given_optimizer = optimizer
        self._given_scheduler = scheduler
        self._given_data = train, validation
        self._loss_fn = loss_fn

    def configure_models(self) -> None:
        """Takes the model as it was given."""
        self.model = self._given_model
        if not self.model.training:
            self.model.train()

    def configure_optimizers(self) -> None:
        """Takes the optimizer, or makes it.

        Raises:
            ConfigError: sharding has replaced the parameters of an optimizer that was made before.
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
                "the optimizer holds none of the model's parameters; with sharding they are replaced: give a function, "
                "such as lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)"
            )
        if (scheduler := self._given_scheduler) is not None:
            self.scheduler = scheduler if isinstance(scheduler, LRScheduler) else scheduler(self.optimizer)

    def configure_dataloaders(self) -> Any:
        """Returns the data as it was given."""
        return self._given_data

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Returns the loss of a batch.

        Raises:
            StepError: the batch has no targets, or the model gives no loss.
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
    """Returns (inputs, targets), the targets None where there are none."""
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
