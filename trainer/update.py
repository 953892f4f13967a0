"""The arithmetic of one optimizer update: accumulate, weigh, synchronise once, measure, guard, clip, step, schedule.

The gradient of an update is that of the mean loss over all its samples (or tokens), however they are cut into
micro-batches and ranks. With w the weight of a micro-batch and W their sum over all ranks, each loss is multiplied by
w * ranks / W before backward; DDP and FSDP2 then average over the ranks, which leaves the sum of w/W times the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from .errors import StepError
from .metrics import MeanMetrics
from .nested import move
from .nonfinite import NonFiniteGuard
from .parallel import whole, without_gradient_sync
from .precision import autocast
from .streams import GlobalBatch

if TYPE_CHECKING:
    from .trainer import Trainer

Weight = float | torch.Tensor


class Update:
    """Makes one optimizer update of a global batch, calling `training_step` for each of this rank's micro-batches.

    It does what the step leaves undone. A step that returns a loss gets backward and optimizer step; one that called
    `trainer.backward(loss)` gets the optimizer step; one that called `trainer.step(optimizer)` too gets nothing more.

    Args:
        trainer: set up, with its models, optimizers and schedulers.
        metrics: gets what the steps return, and the norm of the gradient.

    Attributes:
        is_last_micro_batch: whether the gradients of the micro-batch in hand complete the update.
        learning_rates: those that produced the last update, by name.
    """

    def __init__(self, trainer: Trainer[Any], metrics: MeanMetrics) -> None:
        self._trainer = trainer
        self._metrics = metrics
        self._config = trainer.config
        self._world = trainer.world
        self._models = trainer.models
        by_step = trainer.schedulers.values() if trainer.scheduler_interval == "step" else ()
        self._schedulers = [each for each in by_step if not isinstance(each, ReduceLROnPlateau)]
        self._optimizers = list(trainer.optimizers.values())
        self._group_names = _group_names(trainer.optimizers)
        self._weighs_itself = trainer.weighs_itself
        self._moves = trainer.device.type != "cpu"
        self._guard = NonFiniteGuard(trainer)
        self._scale: Weight = 1.0
        self._went_backward = False
        self._stepped: set[Optimizer] = set()
        self.is_last_micro_batch = True
        self.learning_rates: list[float] = []

    def __call__(self, batch: GlobalBatch) -> None:
        """Makes the update. Every rank must call this with its part of the same global batch."""
        trainer, callbacks, progress = self._trainer, self._trainer.callbacks, self._trainer.progress
        callbacks.on_step_start(trainer)
        micro_batches = batch.micro_batches
        if self._moves:
            micro_batches = [move(micro_batch, trainer.device) for micro_batch in micro_batches]
        weights = self._weights(batch, micro_batches)
        scales = self._scales(batch, weights)
        self._stepped.clear()
        last = len(micro_batches) - 1
        for i, micro_batch in enumerate(micro_batches):
            batch_idx = progress.micro_batches
            callbacks.on_batch_start(trainer, micro_batch, batch_idx)
            self.is_last_micro_batch = i == last
            self._scale = scales[i]
            if i == last:
                outputs = self._forward_backward(micro_batch, batch_idx)
            else:
                with without_gradient_sync(self._models):
                    outputs = self._forward_backward(micro_batch, batch_idx)
            if batch.num_samples[i]:
                self._metrics.add(outputs, weights[i], "train/")
            progress.micro_batches += 1
            callbacks.on_batch_end(trainer, outputs, micro_batch, batch_idx)
        if not self._stepped:
            self._step(self._optimizers)
        else:
            # Nor does an update begin with what the loss of one model has left in another: a generator's in its critic.
            for optimizer in self._optimizers:
                optimizer.zero_grad(set_to_none=True)

    def backward(self, loss: torch.Tensor) -> None:
        """Runs backward, with the loss weighed so that the update's gradient is that of the mean over its samples."""
        _check_loss(loss)
        self._went_backward = True
        if not (isinstance(self._scale, float) and self._scale == 1.0):
            loss = loss * self._scale
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: Optimizer) -> torch.Tensor | None:
        """Steps one optimizer when the gradients are complete, and returns their norm before clipping; else None."""
        if not self.is_last_micro_batch:
            return None
        if optimizer not in self._optimizers:
            raise StepError(
                "step() got an optimizer that is no attribute of the trainer: set it in configure_optimizers()"
            )
        self._stepped.add(optimizer)
        return self._step([optimizer])

    def settle(self) -> None:
        """Waits until all updates so far are known to be finite; a checkpoint may be written then."""
        self._guard.settle()

    def _forward_backward(self, micro_batch: Any, batch_idx: int) -> Mapping[str, Any]:
        self._went_backward = False
        with autocast(self._config.precision, self._trainer.device):
            outputs = self._trainer.training_step(micro_batch, batch_idx)
        if isinstance(outputs, torch.Tensor):
            outputs = {"loss": outputs}
        if not self._went_backward:
            if not isinstance(outputs, Mapping) or "loss" not in outputs:
                raise StepError(
                    f"training_step of {type(self._trainer).__name__} returned {_describe(outputs)}; it must return "
                    'the loss, or a dict with a "loss", or call self.backward(loss) itself'
                )
            self.backward(outputs["loss"])
        elif not isinstance(outputs, Mapping | None):
            raise StepError(
                f"training_step of {type(self._trainer).__name__} returned {_describe(outputs)}; after calling "
                "self.backward itself it may return the loss, a dict of numbers to log, or nothing"
            )
        return outputs or {}

    def _step(self, optimizers: Sequence[Optimizer]) -> torch.Tensor:
        trainer = self._trainer
        trainer.callbacks.on_gradients_ready(trainer)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        parameters = [p for group in groups for p in group["params"] if p.grad is not None]
        if not parameters:
            raise StepError(
                "no parameter of the optimizer got a gradient: the loss does not depend on the model, or the optimizer "
                "was given other parameters than the model's"
            )
        norm = whole(get_total_norm([p.grad for p in parameters]))
        measured = self._guard.check(norm)
        limit = self._config.max_grad_norm
        # Where the norm is known on the host, gradients below the limit are not multiplied by one. 1e-6 as in the call.
        if limit is not None and not (isinstance(measured, float) and measured + 1e-6 <= limit):
            clip_grads_with_norm_(parameters, limit, norm)
        self.learning_rates = [group["lr"] for optimizer in self._optimizers for group in optimizer.param_groups]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for scheduler in self._schedulers:
            if scheduler.optimizer in optimizers:
                scheduler.step()
        self._metrics.add({"grad_norm": measured})
        return norm

    def last_learning_rates(self) -> dict[str, float]:
        """Returns the learning rates that produced the last update: "lr", or "lr/<group>" where there are several."""
        return {name: float(rate) for name, rate in zip(self._group_names, self.learning_rates, strict=False)}

    def _weights(self, batch: GlobalBatch, micro_batches: Sequence[Any]) -> Sequence[Weight]:
        if not self._weighs_itself:
            return batch.num_samples
        return [
            self._trainer.loss_weight(micro_batch) if counts else 0.0
            for micro_batch, counts in zip(micro_batches, batch.num_samples, strict=True)
        ]

    def _scales(self, batch: GlobalBatch, weights: Sequence[Weight]) -> Sequence[Weight]:
        size = self._world.size
        if not self._weighs_itself and batch.global_num_samples is not None:
            return [weight * size / batch.global_num_samples for weight in weights]
        own: Weight = sum(weights, start=0.0)
        if size == 1 and not isinstance(own, torch.Tensor):
            return [weight / own if own else 0.0 for weight in weights]
        # float64 counts any number of tokens exactly; the device may be far behind, so nothing is read back.
        total = self._world.sum(torch.as_tensor(own, dtype=torch.float64, device=self._trainer.device).clone())
        factor = (size / total.clamp(min=1e-12)).float()
        return [weight * factor for weight in weights]


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor):
        raise StepError(f"the loss is {_describe(loss)}; it must be a tensor with one element")
    if loss.dim() != 0 and loss.numel() != 1:
        raise StepError(f"the loss has shape {list(loss.shape)}; reduce it to one number with .mean()")
    if not loss.requires_grad:
        raise StepError(
            "the loss has no gradient: nothing in it depends on a trainable parameter. Was it computed under "
            "no_grad(), detached, or turned into a number with .item()?"
        )


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict with {', '.join(map(repr, value)) or 'nothing in it'}"
    return "nothing" if value is None else f"a {type(value).__name__}"


def _group_names(optimizers: Mapping[str, Optimizer]) -> list[str]:
    """Names every parameter group for the log: "lr" alone, else by optimizer and by the group's own name or number."""
    names = [
        f"lr/{key}/{group.get('name', number)}" if len(optimizer.param_groups) > 1 else f"lr/{key}"
        for key, optimizer in optimizers.items()
        for number, group in enumerate(optimizer.param_groups)
    ]
    return names if len(names) > 1 else ["lr"]
