"""The arithmetic of one optimizer update: accumulate, weigh, synchronise once, unscale, measure, guard, clip, step.

The gradient of an update is that of the mean loss over all its samples (or tokens), however they are cut into
micro-batches and ranks. With w the weight of a micro-batch and W their sum over all ranks, each loss is multiplied by
w * ranks / W before backward; DDP and FSDP2 then average over the ranks, which leaves the sum of w/W times the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..data.protocols import GlobalBatch
from ..data.tree import move
from ..distributed.parallelize import without_gradient_sync
from ..errors import StepError
from ..metrics.means import MeanMetrics
from .gradients import clip_norm, clip_value, norm_groups, report_unused, total_norm
from .lr_stepping import schedulers_at
from .multi_optimizer import GradientIsolation
from .nonfinite import AsyncScalar, NonFiniteGuard, can_skip, skipping
from .nonfinite_report import NonFiniteReport
from .precision import autocast, loss_scaler, without_autocast

if TYPE_CHECKING:
    from ..trainer import Trainer

LossWeight = float | torch.Tensor

HOST_READABLE = ("cpu",)
"""Kinds of devices whose numbers can be looked at without waiting for anything."""


class OptimizerStep:
    """Makes one optimizer update of a global batch, calling `training_step` for each of this rank's micro-batches.

    It does what the step leaves undone. A step that returns a loss gets backward and optimizer step; one that called
    `trainer.backward(loss)` gets the optimizer step; one that called `trainer.step(optimizer)` too gets nothing more.

    An update whose gradient is not finite is refused where the norm is looked at in time: always on a CPU; on another
    device under a policy other than "raise", and with float16. Then the optimizers leave weights and moments alone, and
    what the steps returned or logged is left out. A fused optimizer is told on the device, and the host waits for the
    norm while the optimizer is at work, so that the device does not run dry; for others the host waits before their
    step.

    Args:
        trainer: set up, with its models, optimizers and schedulers.
        metrics: gets what the steps return, and the norm of the gradient.

    Attributes:
        is_last_micro_batch: whether the gradients of the micro-batch in hand complete the update.
        learning_rates: those that produced the last update, by name.
        logged: what a step logs by itself; it counts when the update has been applied.
        weight: how much the micro-batch in hand counts in means; 1 where none is in hand.
        is_padding: whether the micro-batch in hand only keeps the ranks in step: nothing that its step logs counts.
        stepping: the optimizers whose gradients `on_gradients_ready` is about.
        hold: called once before the next optimizer steps: waits until what a save copies may change.

    Raises:
        ConfigError: a pattern of `grad_norm_groups` matches no parameter, or "fp16" is to train float16 weights.
    """

    def __init__(self, trainer: Trainer[Any], metrics: MeanMetrics) -> None:
        self._trainer = trainer
        self._activity = trainer.activity
        self._metrics = metrics
        self._config = trainer.config
        self._world = trainer.world
        self._models = trainer.models
        self._schedulers = schedulers_at(trainer, "step")
        self._optimizers = list(trainer.optimizers.values())
        self._group_names = _group_names(trainer.optimizers)
        self._norm_groups = norm_groups(trainer.models, trainer.config.grad_norm_groups)
        self._overrides_loss_weight = trainer.overrides_loss_weight
        self._overrides_prepare_batch = trainer.overrides_prepare_batch
        self._must_move = trainer.device.type != "cpu"
        self._scaler = loss_scaler(trainer.config.precision, self._optimizers)
        self._guard = NonFiniteGuard(trainer.config, sees_every_norm=self._scaler is not None)
        self._isolation = GradientIsolation(self._optimizers) if len(self._optimizers) > 1 else None
        self._loss_scale: LossWeight = 1.0
        self._micro_batch = 0
        self._called_backward = self._is_applied = False
        self._rejection: str | None = None
        self._stepped: set[Optimizer] = set()
        self._losses: list[tuple[int, torch.Tensor, LossWeight]] = []
        self._not_yet_checked = set(self._optimizers)
        self._replicated = {
            p
            for model in self._models.values()
            if isinstance(model, DistributedDataParallel)
            for p in model.parameters()
        }
        self.stepping: Sequence[Optimizer] = ()
        self.is_last_micro_batch = True
        self.is_padding = False
        self.weight: LossWeight = 1.0
        self._current_weights: Sequence[LossWeight] = ()
        self.learning_rates: list[float | torch.Tensor] = []
        self.logged = MeanMetrics()
        self.wait_for_snapshot: Callable[[], None] | None = None

    def __call__(self, batch: GlobalBatch) -> str | None:
        """Makes the update. Every rank must call this with its part of the same global batch.

        Returns:
            Why the update was not applied, on every rank alike; None if it was.

        Raises:
            NonFiniteError: its gradient is not finite, or that of an earlier update was not, and the policy or its
                bounds have it so.
        """
        try:
            self.logged.reset()
            self._trainer.callbacks.on_step_start(self._trainer)
            return self._accumulate_and_step(batch)
        except BaseException:
            # Whoever goes on after an error must not begin with half a gradient, or with one that is not finite.
            zero_gradients(self._optimizers)
            self.weight = 1.0
            raise

    def _accumulate_and_step(self, batch: GlobalBatch) -> str | None:
        trainer, guard = self._trainer, self._guard
        micro_batches = batch.micro_batches
        if self._must_move:
            micro_batches = [move(micro_batch, trainer.device) for micro_batch in micro_batches]
        self._current_weights = weights = self._loss_weights(batch, micro_batches)
        scales = self._loss_scales(batch, weights)
        while True:
            overflows = self._scaler is not None and self._scaler.may_have_overflowed
            outputs = self._compute_and_step(batch, micro_batches, scales)
            if self._rejection is None or self._is_applied or overflows or not guard.retries:
                break
            guard.retried += 1
            self.logged.reset()
        if self._rejection is None:
            guard.applied()
            if self._scaler is not None:
                self._scaler.grow()
        else:
            guard.skipped += 1
            if self._scaler is not None:
                self._scaler.shrink()
            if not self._is_applied:
                return self._rejection
        for each, weight, counts in zip(outputs, weights, batch.num_samples, strict=True):
            if counts:
                self._metrics.add(each, weight, "train/")
        self._metrics.merge(self.logged)
        return None

    def backward(self, loss: torch.Tensor) -> None:
        """Runs backward for a step that calls it itself, inside its forward pass."""
        self._called_backward = True
        if self._isolation is not None:
            self._isolation.before_backward()
        with without_autocast(self._config.precision, self._trainer.device):
            self._backward(loss)
        self._activity.enter("forward")

    def step(self, optimizer: Optimizer) -> torch.Tensor | None:
        """Steps one optimizer when the gradients are complete, and returns their norm before clipping; else None."""
        if optimizer not in self._optimizers:
            raise StepError(
                "step() got an optimizer that is no attribute of the trainer: set it in configure_optimizers()"
            )
        if self._isolation is not None:
            self._isolation.step(optimizer)
        if not self.is_last_micro_batch:
            return None
        self._stepped.add(optimizer)
        with without_autocast(self._config.precision, self._trainer.device):
            norm = self._step([optimizer])
        self._activity.enter("forward")
        # The forward pass around this call keeps casts of the weights as they were before.
        torch.clear_autocast_cache()
        return norm

    def check_pending_norms(self) -> None:
        """Waits until all updates so far are known to be finite; a checkpoint may be written then."""
        self._guard.check_pending()

    def last_learning_rates(self) -> dict[str, float]:
        """Returns the learning rates that produced the last update: "lr", or "lr/<group>" where there are several."""
        return {name: float(rate) for name, rate in zip(self._group_names, self.learning_rates, strict=False)}

    def counters(self) -> dict[str, float]:
        """Returns what the log says of loss scale and of updates that were not applied, where there can be any."""
        counters = {}
        if self._scaler is not None:
            counters["loss_scale"] = self._scaler.scale
        if self._guard.needs_norm_now:
            counters["skipped_steps"] = float(self._guard.skipped)
        if self._guard.retries:
            counters["retried_steps"] = float(self._guard.retried)
        return counters

    def state_dict(self) -> dict[str, Any]:
        """Returns the loss scale, and the counts of the guard."""
        return {"scaler": self._scaler and self._scaler.state_dict(), "guard": self._guard.state_dict()}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Takes them over; a run that was not in float16 before begins with a fresh scale."""
        self._guard.load_state_dict(state["guard"])
        if self._scaler is not None and state["scaler"] is not None:
            self._scaler.load_state_dict(state["scaler"])

    def _compute_and_step(
        self, batch: GlobalBatch, micro_batches: Sequence[Any], scales: Sequence[LossWeight]
    ) -> list[Mapping[str, Any]]:
        """Computes the gradients, steps if they are finite, and returns what each step returned."""
        trainer, callbacks, progress = self._trainer, self._trainer.callbacks, self._trainer.progress
        isolation = self._isolation
        self._stepped.clear()
        self._batch, self._losses, self._rejection, self._is_applied = batch, [], None, False
        if isolation is not None:
            isolation.begin_update()
        taken = []
        last = len(micro_batches) - 1
        for i, micro_batch in enumerate(micro_batches):
            batch_idx = progress.micro_batches
            self._activity.begin_batch("forward")
            if self._overrides_prepare_batch:
                micro_batch = trainer.prepare_batch(micro_batch)
            self.weight = self._current_weights[i]
            callbacks.on_batch_start(trainer, micro_batch, batch_idx)
            self.is_last_micro_batch = i == last
            self._loss_scale, self._micro_batch = scales[i], i
            self.is_padding = not batch.num_samples[i]
            if i == last:
                outputs = self._forward_backward(micro_batch, batch_idx)
            else:
                # A turn that ends takes gradients back, for which they have to be there.
                with without_gradient_sync(
                    self._models, also_sharded=isolation is None or not isolation.may_step_manually
                ):
                    outputs = self._forward_backward(micro_batch, batch_idx)
            if isolation is not None:
                isolation.end_micro_batch()
            self.is_padding = False
            taken.append(outputs)
            progress.micro_batches += 1
            callbacks.on_batch_end(trainer, outputs, micro_batch, batch_idx)
            self.weight = 1.0
        if not self._stepped:
            self._step(self._optimizers)
        else:
            # Nor does an update begin with what the loss of one model has left in another: a generator's in its critic.
            zero_gradients(self._optimizers)
        return taken

    def _forward_backward(self, micro_batch: Any, batch_idx: int) -> Mapping[str, Any]:
        self._called_backward = False
        with autocast(self._config.precision, self._world.device):
            outputs = self._trainer.training_step(micro_batch, batch_idx)
        if isinstance(outputs, torch.Tensor):
            outputs = {"loss": outputs}
        if not self._called_backward:
            # Beside `Mapping`, for which Python takes ten times as long.
            if not isinstance(outputs, (dict, Mapping)) or "loss" not in outputs:
                raise StepError(
                    f"training_step of {type(self._trainer).__name__} returned {_describe(outputs)}; it must return "
                    'the loss, or a dict with a "loss", or call self.backward(loss) itself'
                )
            self._backward(outputs["loss"])
        elif not isinstance(outputs, Mapping | None):
            raise StepError(
                f"training_step of {type(self._trainer).__name__} returned {_describe(outputs)}; after calling "
                "self.backward itself it may return the loss, a dict of numbers to log, or nothing"
            )
        return outputs or {}

    def _backward(self, loss: torch.Tensor) -> None:
        """Runs backward, with the loss weighed so that the update's gradient is that of the mean over its samples."""
        _check_loss(loss)
        scale = self._loss_scale
        self._losses.append((self._micro_batch, loss, scale))
        if self._scaler is not None:
            # In float32: a loss that came as float16 would overflow.
            loss, scale = loss.float(), scale * self._scaler.scale
        if not (isinstance(scale, float) and scale == 1.0):
            loss = loss * scale
        self._activity.enter("backward")
        loss.backward()  # type: ignore[no-untyped-call]

    def _step(self, optimizers: Sequence[Optimizer]) -> torch.Tensor:
        """Measures the gradients of some optimizers, and steps these if they are finite; returns the norm."""
        trainer, guard = self._trainer, self._guard
        self._activity.enter("optimizer")
        if self._replicated and len(self._losses) > self._micro_batch + 1:
            # DDP reduces the gradients of the first backward after a forward, and lets those of a second one be.
            self._world.all_reduce_mean(
                [p.grad for p in _parameters_with_gradient(optimizers) if p in self._replicated]
            )
        if self._scaler is not None:
            self._scaler.unscale([p.grad for p in _parameters_with_gradient(optimizers)])
        self.stepping = optimizers
        trainer.callbacks.on_gradients_ready(trainer)
        parameters = _parameters_with_gradient(optimizers)
        if not parameters:
            raise StepError(
                "no parameter of the optimizer got a gradient: the loss does not depend on the model, or the optimizer "
                "was given other parameters than the model's"
            )
        if self._not_yet_checked:
            self._check_gradients(optimizers)
        norm = total_norm([p.grad for p in parameters])
        measured: float | torch.Tensor = norm
        arrival: AsyncScalar | None = None
        not_finite: torch.Tensor | None = None
        if norm.device.type in HOST_READABLE:
            measured = norm.item()
            if not math.isfinite(measured):
                return self._reject(optimizers, norm, measured)
        elif guard.needs_norm_now:
            arrival = AsyncScalar(norm)
            if all(can_skip(optimizer) for optimizer in optimizers):
                not_finite = norm.isfinite().logical_not().float()
            elif not math.isfinite(value := arrival.wait()):
                return self._reject(optimizers, norm, value)
        else:
            guard.watch(trainer.progress.step + 1, AsyncScalar(norm), self._nonfinite_report())
        norms = {"grad_norm": measured}
        for pattern, group in self._norm_groups.items():
            # In another optimizer's turn a group has no gradient.
            if own := [p.grad for p in parameters if p in group]:
                norms[f"grad_norm/{pattern}"] = total_norm(own)
        self._clip(parameters, norm, measured)
        if self.wait_for_snapshot is not None:
            self.wait_for_snapshot()
            self.wait_for_snapshot = None
        rates = [_snapshot_rate(group["lr"]) for optimizer in self._optimizers for group in optimizer.param_groups]
        for optimizer in optimizers:
            if not_finite is None:
                optimizer.step()
            else:
                with skipping(optimizer, not_finite):
                    optimizer.step()
        if not_finite is not None and arrival is not None and not math.isfinite(value := arrival.wait()):
            return self._reject(optimizers, norm, value)
        zero_gradients(optimizers)
        for scheduler in self._schedulers:
            if scheduler.optimizer in optimizers:
                scheduler.step()
        self._is_applied = True
        self.learning_rates = rates
        if self._world.is_main:  # equal on all ranks: counted once, its mean is that of updates however many ranks
            self._metrics.add(norms)
        return norm

    def _reject(self, optimizers: Sequence[Optimizer], norm: torch.Tensor, value: float) -> torch.Tensor:
        """Leaves everything as it is, and takes note that an update was to be made of a gradient that is not finite."""
        if self._scaler is not None and self._scaler.may_have_overflowed:
            self._rejection = f"the gradient overflows at loss scale {self._scaler.scale:g}"
        else:
            self._guard.count_rejected(self._trainer.progress.step + 1, value, self._nonfinite_report())
            self._rejection = f"the norm of the gradient is {value}"
        zero_gradients(optimizers)
        return norm

    def _clip(self, parameters: Sequence[torch.Tensor], norm: torch.Tensor, measured: float | torch.Tensor) -> None:
        limit, largest = self._config.max_grad_norm, self._config.max_grad_value
        # Where the norm is known on the host, gradients below the limit are not multiplied by one. 1e-6 as in the call.
        if limit is not None and not (isinstance(measured, float) and measured + 1e-6 <= limit):
            clip_norm(parameters, limit, norm)
        if largest is not None:
            clip_value(parameters, largest)

    def _nonfinite_report(self) -> NonFiniteReport:
        return NonFiniteReport(self._world, self._models, self._batch, self._losses)

    def _check_gradients(self, optimizers: Sequence[Optimizer]) -> None:
        """Names, once, the parameters that have no gradient in the first update of their optimizer."""
        first = self._not_yet_checked.intersection(optimizers)
        self._not_yet_checked -= first
        forgotten = {
            p for o in first for group in o.param_groups for p in group["params"] if p.requires_grad and p.grad is None
        }
        report_unused(self._models, forgotten, is_main=self._world.is_main)

    def _loss_weights(self, batch: GlobalBatch, micro_batches: Sequence[Any]) -> Sequence[LossWeight]:
        if not self._overrides_loss_weight:
            return batch.num_samples
        return [
            self._trainer.loss_weight(micro_batch) if counts else 0.0
            for micro_batch, counts in zip(micro_batches, batch.num_samples, strict=True)
        ]

    def _loss_scales(self, batch: GlobalBatch, weights: Sequence[LossWeight]) -> Sequence[LossWeight]:
        size = self._world.size
        if not self._overrides_loss_weight and batch.global_num_samples is not None:
            return [weight * size / batch.global_num_samples for weight in weights]
        own: LossWeight = sum(weights, start=0.0)
        if size == 1 and not isinstance(own, torch.Tensor):
            return [weight / own if own else 0.0 for weight in weights]
        # float64 counts any number of tokens exactly; the device may be far behind, so nothing is read back, and no
        # copy of a number waits for it either.
        device = self._trainer.device
        if isinstance(own, torch.Tensor):
            total = own.to(device, torch.float64, non_blocking=True, copy=True)
        else:
            total = torch.full((), own, dtype=torch.float64, device=device)
        self._world.all_reduce_sum(total)
        factor = (size / total.clamp(min=1e-12)).float()
        return [weight * factor for weight in weights]


def _parameters_with_gradient(optimizers: Sequence[Optimizer]) -> list[Any]:
    return [
        p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"] if p.grad is not None
    ]


def zero_gradients(optimizers: Sequence[Optimizer]) -> None:
    """Lets go of the gradients of all that these optimizers hold."""
    for optimizer in optimizers:
        if getattr(optimizer.zero_grad, "__func__", None) is not Optimizer.zero_grad:
            optimizer.zero_grad(set_to_none=True)
            continue
        # What it does, without its record for the profiler, which takes 20 microseconds.
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = None


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


def _snapshot_rate(rate: float | torch.Tensor) -> float | torch.Tensor:
    """A learning rate that is a tensor is written over by its scheduler."""
    return rate.clone() if isinstance(rate, torch.Tensor) else rate
