"""One optimizer update: accumulate, weight losses, reduce once, unscale, compute the norm, check, clip, step.

The gradient of an update is that of the mean loss over all its samples (or tokens), however they are divided into
micro-batches and ranks. With w the weight of a micro-batch and W the sum of weights over all ranks, each loss is
multiplied by w * ranks / W before backward; DDP and FSDP2 then average over the ranks, which gives the sum of w/W times
the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..data.protocols import GlobalBatch
from ..data.tree import map_tensors, move
from ..distributed.ddp import ReplicatedModule, frozen_when_wrapped
from ..distributed.fsdp import (
    add_optimizer_advice,
    buffers_to_sync,
    check_functions,
    reduce_unused,
    sharded_roots,
    units_of,
    whole_parameters,
)
from ..distributed.gather_order import GatherOrder
from ..distributed.parallelize import without_gradient_sync
from ..errors import ConfigError, StepError
from ..loop.context import RunContext
from ..loop.steps import LossWeight, Steps
from ..metrics.means import MeanMetrics
from ..private_torch import can_skip
from .first_update import FirstUpdateCheck
from .gradients import (
    clip_norm,
    clip_value,
    hook_advice,
    norm_groups,
    parameters_with_gradient,
    scale_gradients,
    total_norm,
    zero_gradients,
)
from .loss_weights import loss_weights, scales_of_mean
from .multi_optimizer import GradientIsolation, calls_backward_repeatedly, trained_in_parts
from .nonfinite import AsyncScalar, NonFiniteGuard, skipping
from .nonfinite_report import NonFiniteReport
from .optimizer_rng import OptimizerRng
from .precision import autocast, loss_scaler, without_autocast
from .skipped_losses import SkippedLosses

HOST_READABLE = ("cpu",)
"""Device types whose numbers the host can read without synchronizing."""


class OptimizerStep:
    """Makes one optimizer update of a global batch.

    A call with a batch runs `training_step` for each of this rank's micro-batches, and then the rest of the update:
    backward and optimizer step if the step returned a loss; only the optimizer step if it called `backward(loss)`;
    neither if it also called `step(optimizer)`. For custom loops, `accumulate` yields the micro-batches instead, and
    `complete` makes the update.

    An update with a non-finite gradient is rejected if the norm is known in time: always on a CPU; on another device
    with a policy other than "raise", or with float16. Then weights and optimizer state do not change, and metrics of
    the step are dropped. A fused optimizer gets a flag on the device, and the host waits for the norm during the
    optimizer step, so that the device stays busy; for others the host waits before the step.

    Args:
        ctx: with models, optimizers and schedulers.
        steps: the user's steps.
        metrics: gets the values that the steps return, and the norm of the gradient.

    Attributes:
        is_last_micro_batch: whether the current micro-batch is the last of the update.
        learning_rates: of the last update, in the order of the parameter groups; None for a group without one.
        logged: values that the step logs; merged into `metrics` when the update is applied.
        weight: of the current micro-batch in means; 1 between micro-batches.
        is_padding: whether the current micro-batch only keeps the ranks in step: its values do not count.
        stepping: the optimizers that are about to step, for `on_gradients_ready`.
        gather_order: compares which parts of sharded models the ranks gather; None if there are none.
        wait_for_snapshot: called once before the next optimizer step; waits until a save has copied the state.
        should_log: whether values logged now count on this rank.

    Raises:
        ConfigError: a pattern of `grad_norm_groups` matches no parameter, or the weights are float16 with "fp16".
    """

    def __init__(self, ctx: RunContext, steps: Steps, metrics: MeanMetrics) -> None:
        self._ctx, self._steps, self._metrics = ctx, steps, metrics
        self._config, self._world, self._models = ctx.config, ctx.world, ctx.models
        self._loss_world = ctx.mesh.loss
        self._activity, self._callbacks = ctx.activity, ctx.callbacks
        self._schedulers = ctx.lr_stepping.at("step")
        self._optimizers = list(ctx.optimizers.values())
        self._group_names = _group_names(ctx.optimizers)
        self._norm_groups = norm_groups(ctx.models, ctx.config.grad_norm_groups)
        self._must_move = ctx.device.type != "cpu"
        self._scaler = loss_scaler(ctx.config.precision, self._optimizers, steps.configure_loss_scaler, ctx.world)
        self._is_scale_stuck = False
        self._guard = NonFiniteGuard(ctx.config, sees_every_norm=self._scaler is not None)
        self._isolation = GradientIsolation(self._optimizers) if len(self._optimizers) > 1 else None
        self._micro_batches: Sequence[Any] = ()
        self._current_weights: Sequence[LossWeight] = ()
        self._loss_scales_now: Sequence[LossWeight] = ()
        self._loss_scale: LossWeight = 1.0
        self._micro_batch = 0
        self._returned: Mapping[str, Any] = {}
        self._outputs: list[Mapping[str, Any]] = []
        self._called_backward = self._is_applied = self._is_accumulating = self._has_accumulated = False
        self._rejection: str | None = None
        self._stepped: set[Optimizer] = set()
        self._skipped = SkippedLosses(ctx.world, ctx.config.max_skipped_losses, ctx.name)
        self._losses: list[tuple[int, torch.Tensor, LossWeight]] = []
        self._first_update = FirstUpdateCheck(ctx)
        self._replicated = [model for model in self._models.values() if isinstance(model, ReplicatedModule)]
        if not ctx.config.parallel.find_unused_parameters and calls_backward_repeatedly(type(steps)):
            for model in trained_in_parts(self._replicated, self._optimizers):
                model.leave_gradients()
        # Gradients of these are averaged by `_reduce_the_rest`, if they are unfrozen.
        self._unfrozen_later: frozenset[torch.Tensor] = (
            frozen_when_wrapped(self._models.values()) if self._world.size > 1 else frozenset()
        )
        self._sharded = {name: model for name, model in self._models.items() if sharded_roots(model)}
        self._units = units_of(self._sharded.values())
        self._buffers_to_sync = buffers_to_sync(self._sharded.values())
        # Not under compile, whose code would be compiled again for each number.
        is_compiled = ctx.config.parallel.compile
        self.gather_order: GatherOrder | None = None
        if self._sharded and not is_compiled:
            # A loop of the user's is in "forward" as soon as it has its batch.
            outside = ("between updates", "reading data", "forward")
            self.gather_order = GatherOrder(self._sharded, ctx.world, is_outside=lambda: ctx.activity.phase in outside)
        self._whole = {parameter for model in self._sharded.values() for parameter in whole_parameters(model)}
        if ctx.config.parallel.find_unused_parameters:
            reduce_unused(self._sharded.values())
        # Graphs are freed after each micro-batch; autograd would create their ends again for every parameter.
        self._graph_ends: list[GradientEdge] = [
            get_gradient_edge(p)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for p in group["params"]
            if p.requires_grad and not isinstance(p, DTensor)
        ]
        self._in_user_step = False
        every = (parameter for model in self._models.values() for parameter in model.parameters())
        self._positions = {id(parameter): position for position, parameter in enumerate(every)}
        self._sorted_ids: list[int] = []
        self._sorted: list[Any] = []
        self._rng = OptimizerRng(self._optimizers, ctx.config.seed) if ctx.world.size > 1 else None
        for name, optimizer in ctx.optimizers.items():
            optimizer.register_step_pre_hook(partial(self._refuse_other_steps, name))
        self.stepping: Sequence[Optimizer] = ()
        self.is_last_micro_batch = True
        self.is_padding = False
        self.weight: LossWeight = 1.0
        self.learning_rates: list[float | torch.Tensor | None] = []
        self.logged = MeanMetrics()
        self.wait_for_snapshot: Callable[[], None] | None = None

    def __call__(self, batch: GlobalBatch) -> str | None:
        """Make the update. Every rank must call this with its part of the same global batch.

        Returns:
            Why the update was not applied, equal on every rank; None if it was.

        Raises:
            NonFiniteError: the gradient of this or an earlier update is not finite, and the config does not allow
                skipping or repeating it.
        """
        with self._discarding_gradients_on_error():
            self.logged.reset()
            self._callbacks.on_step_start()
            return self._accumulate_and_step(batch)

    def accumulate(self, batch: GlobalBatch) -> Generator[Any, None, None]:
        """Yield this rank's micro-batches, for a loop that calls `backward_and_log` for each and then `complete`.

        Raises:
            StepError: a micro-batch got no backward pass.
        """
        self._has_accumulated = False
        self.logged.reset()
        self._callbacks.on_step_start()
        self._prepare(batch)
        self._is_accumulating = True
        try:
            with closing(self._each_micro_batch()) as each:
                for micro_batch, _ in each:
                    self._in_user_step = True
                    self._first_update.before_forward()
                    with autocast(self._config.precision, self._world.device):
                        yield micro_batch
                    self._in_user_step = False
                    if not self._called_backward:
                        raise StepError("a micro-batch got no backward pass: call run.backward(loss) for each of them")
            self._has_accumulated = True
        finally:
            self._is_accumulating = False

    def backward_and_log(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Run backward inside `accumulate`, and log the loss.

        Raises:
            StepError: not called inside `accumulate`, or the loss is not a single number with a gradient.
        """
        if not self._is_accumulating:
            raise StepError(
                "run.backward(loss) was called outside of `for micro_batch in run.accumulate(batch)`, which determines "
                "the weight of the loss: move it into that loop"
            )
        if self._first_update.has_other_gradients():
            raise StepError(
                "gradients were changed by loss.backward() or zero_grad() inside `for micro_batch in "
                "run.accumulate(batch)`: remove these calls; run.backward(loss) adds up the gradients, and run.step() "
                "clears them"
            )
        self.backward(loss, retain_graph=retain_graph)
        before = self._returned.get("loss")
        self._returned = {"loss": loss.detach() if before is None else before + loss.detach()}

    def complete(self) -> str | None:
        """Make the update from the accumulated gradients, as `__call__` does. Every rank must call this."""
        if not self._has_accumulated:
            raise StepError(
                "run.step() needs backward passes for all micro-batches of the update: run `for micro_batch in "
                "run.accumulate(batch)` to its end, and call run.step() after it"
            )
        self._has_accumulated = False
        with self._discarding_gradients_on_error():
            self._step_accumulated()
            return self._conclude()

    @property
    def should_log(self) -> bool:
        """Whether values logged now count on this rank."""
        return not self.is_padding

    def describe(self) -> str | None:
        """Return a message for users about this kind of step, or None."""
        return None

    def metric_source(self) -> Callable[[Mapping[str, float]], dict[str, float]] | None:
        """Return a function whose metrics are added to every record of the log, or None."""
        return None

    @contextmanager
    def _discarding_gradients_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            # An update after an error must not start with partial or non-finite gradients.
            zero_gradients(self._optimizers)
            self.weight = 1.0
            raise

    def _accumulate_and_step(self, batch: GlobalBatch) -> str | None:
        guard = self._guard
        self._prepare(batch)
        while True:
            overflows = self._may_have_overflowed
            self._compute_and_step()
            may_repeat = guard.retries and not overflows and not self._skips_update
            if self._rejection is None or self._is_applied or not may_repeat:
                return self._conclude()
            guard.retried += 1
            self.logged.reset()

    def _prepare(self, batch: GlobalBatch) -> None:
        """Compute the weights of the micro-batches, which move to the device now only if they determine them."""
        self._batch, self._micro_batches = batch, batch.micro_batches
        if self._must_move and self._steps.overrides_loss_weight:
            self._micro_batches = [move(micro_batch, self._ctx.device) for micro_batch in self._micro_batches]
        self._current_weights = loss_weights(self._ctx, self._steps, batch, self._micro_batches)
        self._loss_scales_now = self._loss_scales(batch, self._current_weights)

    def _conclude(self) -> str | None:
        """Count the update as applied or rejected, and add its metrics if it was applied."""
        guard = self._guard
        if self.gather_order is not None:
            self.gather_order.stop()
            self.gather_order.end_update()
        if self._rejection is None:
            guard.applied()
        else:
            guard.skipped += 1
        if not self._skips_update:
            self._update_scale(overflowed=self._rejection is not None)
        if self._rejection is not None and not self._is_applied:
            return self._rejection
        for each, weight, counts in zip(self._outputs, self._current_weights, self._batch.num_samples, strict=True):
            if counts:
                self._metrics.add(each, weight, "train/")
        if self.logged.has_values:
            self._check_names()
            self._metrics.merge(self.logged)
        return None

    @property
    def _skips_update(self) -> bool:
        """Whether no micro-batch of the update had a loss."""
        return 0 < self._skipped.in_update == len(self._micro_batches)

    @property
    def _may_have_overflowed(self) -> bool:
        """Whether the loss scale may be the cause of a non-finite gradient, and a lower one the remedy."""
        return self._scaler is not None and self._scaler.scale > 1.0 and not self._is_scale_stuck

    def _update_scale(self, *, overflowed: bool) -> None:
        if self._scaler is None:
            return
        before = self._scaler.scale
        self._scaler.update(overflowed=overflowed)
        if not 0 < self._scaler.scale < math.inf:
            raise ConfigError(f"the scale of {type(self._scaler).__name__} must be > 0, got {self._scaler.scale}")
        # With a scale that does not fall, every update could overflow for ever: the policy for NaN then applies.
        self._is_scale_stuck = overflowed and self._scaler.scale >= before

    def _check_names(self) -> None:
        """Check that no number is both logged and returned: their mean would be that of neither."""
        returned = {f"train/{name}" for outputs in self._outputs for name in outputs}
        if twice := sorted(returned & self.logged.names()):
            name = twice[0].removeprefix("train/")
            raise StepError(
                f"{name!r} is both returned by training_step and logged by self.log({name!r}, ...) during the update: "
                "rename one of them"
            )

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Run backward for a step that calls it, inside its forward pass."""
        self._called_backward = True
        if self._isolation is not None:
            self._isolation.before_backward()
        with without_autocast(self._config.precision, self._ctx.device):
            self._backward(loss, retain_graph=retain_graph)
        self._activity.enter("forward")

    def step(self, optimizer: Optimizer) -> torch.Tensor | None:
        """Step one optimizer and return the norm before clipping; return None while gradients are accumulated."""
        if optimizer not in self._optimizers:
            raise StepError(
                "step() got an optimizer that is not an attribute of the trainer: set it in configure_optimizers()"
            )
        if not self._called_backward:
            raise StepError(
                "step(optimizer) was called without backward(loss), whose gradients it steps with: call self.backward "
                "before it. Pass gradients that you compute through a loss: self.backward(sum of "
                "(parameter * gradient).sum())"
            )
        if self._isolation is not None:
            self._isolation.step(optimizer)
        if not self.is_last_micro_batch:
            return None
        self._stepped.add(optimizer)
        with without_autocast(self._config.precision, self._ctx.device):
            norm = self._step([optimizer])
        self._activity.enter("forward")
        # Autocast caches casts of the weights in the surrounding forward pass, which are now outdated.
        torch.clear_autocast_cache()
        return norm

    def check_pending_norms(self) -> None:
        """Wait until all updates so far are known to be finite, for example before a save."""
        self._guard.check_pending()

    def last_learning_rates(self) -> dict[str, float]:
        """Return the learning rates of the last update: "lr", or "lr/<group>" if there are several."""
        rates = zip(self._group_names, self.learning_rates, strict=False)
        return {name: float(rate) for name, rate in rates if rate is not None}

    def counters(self) -> dict[str, float]:
        """Return the loss scale and the numbers of skipped and retried updates for the log, if applicable."""
        counters = {}
        if self._scaler is not None:
            counters["loss_scale"] = self._scaler.scale
        if self._guard.needs_norm_now:
            counters["skipped_steps"] = float(self._guard.skipped)
        if self._config.max_skipped_losses:
            counters["skipped_losses"] = float(self._skipped.total)
        if self._guard.retries:
            counters["retried_steps"] = float(self._guard.retried)
        return counters

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale and the counters of the guard."""
        return {
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "is_scale_stuck": self._is_scale_stuck,
            "guard": self._guard.state_dict(),
            "skipped_losses": self._skipped.total,
        }

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Restore them; a run that was not in float16 before starts with the initial scale."""
        self._guard.load_state_dict(state["guard"])
        self._skipped.total = state["skipped_losses"]
        if self._scaler is not None and state["scaler"] is not None:
            self._scaler.load_state_dict(state["scaler"])
            self._is_scale_stuck = state["is_scale_stuck"]

    def _compute_and_step(self) -> None:
        """Compute the gradients by `training_step`, and step if they are finite."""
        self._compute_gradients()
        self._step_accumulated()

    def _compute_gradients(self) -> None:
        with closing(self._each_micro_batch()) as each:
            for micro_batch, batch_idx in each:
                self._returned = self._forward_backward(micro_batch, batch_idx)

    def _each_micro_batch(self) -> Generator[tuple[Any, int], None, None]:
        """Yield each micro-batch with its number, within hooks, weights and gradient synchronization."""
        callbacks, progress, isolation = self._callbacks, self._ctx.progress, self._isolation
        self._begin_attempt()
        if self._buffers_to_sync:
            with torch.no_grad():
                self._world.broadcast_tensors(self._buffers_to_sync)
        if isolation is not None:
            isolation.begin_update()
        last = len(self._micro_batches) - 1
        for i, micro_batch in enumerate(self._micro_batches):
            batch_idx = progress.micro_batches
            self._activity.begin_batch("forward")
            if self._must_move and not self._steps.overrides_loss_weight:
                # One at a time: an update may accumulate more than the device can hold.
                micro_batch = move(micro_batch, self._ctx.device)
            if self._steps.overrides_prepare_batch:
                micro_batch = self._steps.prepare_batch(micro_batch)
            self.weight = self._current_weights[i]
            callbacks.on_batch_start(micro_batch, batch_idx)
            self.is_last_micro_batch = i == last
            for model in self._replicated:
                model.reduces_itself = False
            self._loss_scale, self._micro_batch = self._loss_scales_now[i], i
            self.is_padding = not self._batch.num_samples[i]
            self._returned, self._called_backward = {}, False
            # Gradient isolation restores unsharded gradients, so they must not be sharded before.
            reaches = isolation is not None and isolation.may_step_manually
            unreduced = nullcontext() if i == last else self._without_gradient_sync(must_reach_parameters=reaches)
            with unreduced, self._ctx.divided_sequences(self._steps, micro_batch):
                if self.gather_order is not None:
                    self.gather_order.start()
                yield micro_batch, batch_idx
            if isolation is not None:
                isolation.end_micro_batch()
            self.is_padding = False
            self._outputs.append(self._returned)
            progress.micro_batches += 1
            callbacks.on_batch_end(self._returned, micro_batch, batch_idx)
            self.weight = 1.0

    def _without_gradient_sync(self, *, must_reach_parameters: bool) -> AbstractContextManager[object]:
        no_sync = self._config.parallel.no_sync
        return without_gradient_sync(self._models, no_sync=no_sync, must_reach_parameters=must_reach_parameters)

    def _begin_attempt(self) -> None:
        self._stepped.clear()
        self._in_user_step = False
        self._outputs, self._losses, self._rejection, self._is_applied = [], [], None, False
        self._skipped.in_update = 0

    def _step_accumulated(self) -> None:
        """Step all optimizers, unless the user's steps have done so."""
        self._reshard()
        if self._skips_update:
            self._rejection = "training_step returned no loss"
        elif not self._stepped:
            self._step(self._optimizers)
        else:
            # The loss of one model may have left gradients in another, such as a generator's in its critic.
            zero_gradients(self._optimizers)

    def _reshard(self) -> None:
        """Free gathered weights, see `fsdp.reshard`; for every update, so without a search for the modules."""
        for unit in self._units:
            unit.reshard()

    def _forward_backward(self, micro_batch: Any, batch_idx: int) -> Mapping[str, Any]:
        self._first_update.before_forward()
        self._in_user_step = True
        with autocast(self._config.precision, self._world.device):
            outputs = self._steps.training_step(micro_batch, batch_idx)
        self._in_user_step = False
        self._first_update.warn_of_evaluation_mode()
        if isinstance(outputs, torch.Tensor) or (outputs is None and self._config.max_skipped_losses):
            outputs = {"loss": outputs}
        if not self._called_backward:
            if self._first_update.has_other_gradients():
                raise StepError(
                    f"training_step of {self._ctx.name} changed gradients by loss.backward() or zero_grad(): return "
                    "the loss and remove these calls, because Headway makes them; or call self.backward(loss) and "
                    "self.step(optimizer), which accumulate over micro-batches and ranks. Pass gradients "
                    "that you compute through a loss: self.backward(sum of (parameter * gradient).sum())"
                )
            if isinstance(outputs, dict) and type(outputs) is not dict:
                # Such as the output of a Hugging Face model, which cannot be copied with other values.
                outputs = dict(outputs)
            # dict first: isinstance(x, Mapping) is 10x slower.
            if not isinstance(outputs, (dict, Mapping)) or "loss" not in outputs:
                raise StepError(
                    f"training_step of {self._ctx.name} returned {_describe(outputs)}; it must return "
                    'the loss, or a dict with "loss", or call self.backward(loss)'
                )
            if self.gather_order is not None:
                self.gather_order.stop()
            if self._config.max_skipped_losses and self._skipped.agree_to_skip(outputs["loss"] is None):
                for model in self._replicated:
                    # DDP reduces no gradient of this forward pass.
                    model.reduces_itself = False
                self._reshard()  # as a backward pass does
                return {}
            loss = self._backward(outputs["loss"])
            if len(outputs) == 1:
                return {"loss": loss}
        elif not isinstance(outputs, Mapping | None):
            raise StepError(
                f"training_step of {self._ctx.name} returned {_describe(outputs)}; after self.backward(loss) it may "
                "return the loss, a dict of numbers to log, or nothing"
            )
        if not outputs:
            return {}
        # Without their graph, which would live, with what its functions keep, until the next update.
        return map_tensors(_detach, outputs)  # type: ignore[no-any-return]

    def _backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> torch.Tensor:
        """Run backward, with the loss weighted so that the update's gradient is that of the mean over its samples.

        Returns:
            The loss as given, without its graph.
        """
        _check_loss(loss)
        if self._sharded and self._first_update.is_due:
            check_functions(loss)
        scale, detached = self._loss_scale, loss.detach()
        self._losses.append((self._micro_batch, detached, scale))
        if self._scaler is not None:
            # In float32: a float16 loss would overflow.
            loss, scale = loss.float(), scale * self._scaler.scale
        if not (isinstance(scale, float) and scale == 1.0):
            loss = loss * scale
        self._activity.enter("backward")
        if (order := self.gather_order) is not None:
            order.stop()
        loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        if order is not None and self._called_backward:
            order.start()
        return detached

    def _step(self, optimizers: Sequence[Optimizer]) -> torch.Tensor:
        """Compute the gradient norm of some optimizers, step them if it is finite, and return the norm."""
        guard = self._guard
        self._activity.enter("optimizer")
        if self._replicated or self._unfrozen_later or self._whole:
            self._reduce_the_rest(optimizers)
        if self._scaler is not None:
            scale_gradients([p.grad for p in parameters_with_gradient(optimizers)], 1.0 / self._scaler.scale)
        self.stepping = optimizers
        self._callbacks.on_gradients_ready()
        parameters = self._in_model_order(parameters_with_gradient(optimizers))
        if not parameters:
            raise StepError(
                "no parameter of the optimizer got a gradient: the loss does not depend on the model, or the optimizer "
                f"has other parameters than the model{hook_advice(self._models)}"
            )
        if self._first_update.is_due:
            has_stepped = len(self._stepped) > 1
            self._first_update.check_gradients(optimizers, self._replicated, has_stepped=has_stepped)
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
            guard.watch(self._ctx.progress.step + 1, AsyncScalar(norm), self._nonfinite_report())
        norms = {"grad_norm": measured}
        for pattern, group in self._norm_groups.items():
            # A group has no gradient when another optimizer steps.
            if own := [p.grad for p in parameters if p in group]:
                norms[f"grad_norm/{pattern}"] = total_norm(own)
        self._clip(parameters, norm, measured)
        if self.wait_for_snapshot is not None:
            self.wait_for_snapshot()
            self.wait_for_snapshot = None
        rates = [_snapshot_rate(group.get("lr")) for optimizer in self._optimizers for group in optimizer.param_groups]
        self._call_optimizers(optimizers, not_finite)
        if not_finite is not None and arrival is not None and not math.isfinite(value := arrival.wait()):
            return self._reject(optimizers, norm, value)
        zero_gradients(optimizers)
        for scheduler in self._schedulers:
            if scheduler.optimizer in optimizers:
                self._ctx.lr_stepping.step(scheduler)
        self._is_applied = True
        self.learning_rates = rates
        # Equal on all ranks, so added once in each group of ranks that merge their metrics.
        if self._loss_world.is_main:
            self._metrics.add(norms)
        return norm

    def _call_optimizers(self, optimizers: Sequence[Optimizer], not_finite: torch.Tensor | None) -> None:
        """Call `step` of each; with `not_finite`, a flag on the device, an optimizer changes nothing if it is 1."""
        before = self._in_user_step, self._is_accumulating
        self._in_user_step = self._is_accumulating = False
        for optimizer in optimizers:
            try:
                with ExitStack() as stack:
                    if not_finite is not None:
                        stack.enter_context(skipping(optimizer, not_finite))
                    if self._rng is not None:
                        stack.enter_context(self._rng.alike(optimizer, self._ctx.progress.step))
                    optimizer.step()
            except Exception as error:
                if self._sharded:
                    add_optimizer_advice(error, optimizer)
                raise
        self._in_user_step, self._is_accumulating = before

    def _in_model_order(self, parameters: list[Any]) -> list[Any]:
        """Sort parameters as the models do, so that their norm adds as in `clip_grad_norm_(model.parameters())`.

        Optimizers often have groups in another order. Sorted again only if there are other parameters than last time.
        """
        ids = list(map(id, parameters))
        if ids != self._sorted_ids:
            self._sorted_ids, last = ids, len(self._positions)
            self._sorted = sorted(parameters, key=lambda parameter: self._positions.get(id(parameter), last))
        return self._sorted

    def _refuse_other_steps(self, name: str, *_: Any) -> None:
        if self._is_accumulating or self._has_accumulated:
            raise StepError(f"step() of {name!r} was called, but run.step() steps the optimizers: remove the call")
        if self._in_user_step:
            raise StepError(
                f"self.{name}.step() was called, but Headway steps the optimizers that are attributes: return the loss "
                f"from training_step and remove the call, or use self.backward(loss) and self.step(self.{name})"
            )

    def _reduce_the_rest(self, optimizers: Sequence[Optimizer]) -> None:
        """Average the gradients that DDP and FSDP2 did not.

        Those of forward passes around DDP, of a second backward pass after one forward pass, of parameters that were
        frozen when the model was wrapped, and of parameters that every rank holds whole in a sharded model.
        """
        twice = len(self._losses) > self._micro_batch + 1
        rest: frozenset[torch.Tensor] | set[torch.Tensor]
        rest = {p for model in self._replicated if twice or not model.reduces_itself for p in model.parameters()}
        rest = rest | self._unfrozen_later | self._whole
        if rest:
            self._loss_world.all_reduce_mean([p.grad for p in parameters_with_gradient(optimizers) if p in rest])

    def _reject(self, optimizers: Sequence[Optimizer], norm: torch.Tensor, value: float) -> torch.Tensor:
        """Reject the update because of a non-finite gradient: clear the gradients and record why."""
        if self._scaler is not None and self._may_have_overflowed:
            self._rejection = f"the gradient overflows at loss scale {self._scaler.scale:g}"
        else:
            self._guard.count_rejected(self._ctx.progress.step + 1, value, self._nonfinite_report())
            self._rejection = f"the norm of the gradient is {value}"
        zero_gradients(optimizers)
        return norm

    def _clip(self, parameters: Sequence[torch.Tensor], norm: torch.Tensor, measured: float | torch.Tensor) -> None:
        limit, largest = self._config.max_grad_norm, self._config.max_grad_value
        # Skips a multiplication by one if the host knows the norm. 1e-6 as in clip_norm.
        if limit is not None and not (isinstance(measured, float) and measured + 1e-6 <= limit):
            # A NaN would spoil every gradient before the report can name the parameters.
            clip_norm(parameters, limit, norm if isinstance(measured, float) else norm.nan_to_num(limit, math.inf))
        if largest is not None:
            clip_value(parameters, largest)

    def _nonfinite_report(self) -> NonFiniteReport:
        return NonFiniteReport(self._world, self._models, self._batch, self._losses)

    def _loss_scales(self, batch: GlobalBatch, weights: Sequence[LossWeight]) -> Sequence[LossWeight]:
        """Return the factors by which the losses of this rank's micro-batches are multiplied."""
        if self._steps.overrides_loss_weight:
            return scales_of_mean(weights, self._loss_world, self._ctx.device)
        # A number of rows is that of all ranks that work on these rows.
        world = self._ctx.mesh.data
        if batch.global_num_samples is not None:
            return [weight * world.size / batch.global_num_samples for weight in weights]
        return scales_of_mean(weights, world, self._ctx.device)


def _detach(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor):
        hint = " (max_skipped_losses lets a step skip micro-batches)" if loss is None else ""
        raise StepError(f"the loss is {_describe(loss)}; it must be a tensor with one element{hint}")
    if loss.dim() != 0 and loss.numel() != 1:
        raise StepError(f"the loss has shape {list(loss.shape)}; reduce it to one number with .mean()")
    if not loss.requires_grad:
        raise StepError(
            "the loss has no gradient: it does not depend on a trainable parameter. Was it computed under no_grad(), "
            "detached, or converted to a number with .item()? A step that runs backward itself calls "
            "self.backward(loss)"
        )


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict with {', '.join(map(repr, value)) or 'no items'}"
    return "nothing" if value is None else f"a {type(value).__name__}"


def _group_names(optimizers: Mapping[str, Optimizer]) -> list[str]:
    """Return the log's name of every parameter group: "lr" for a single one, else with optimizer and group."""
    names = [
        f"lr/{key}/{group.get('name', number)}" if len(optimizer.param_groups) > 1 else f"lr/{key}"
        for key, optimizer in optimizers.items()
        for number, group in enumerate(optimizer.param_groups)
    ]
    return names if len(names) > 1 else ["lr"]


def _snapshot_rate(rate: float | torch.Tensor | None) -> float | torch.Tensor | None:
    """Copy a learning rate that is a tensor, since schedulers overwrite it in place; None if an optimizer has none."""
    return rate.clone() if isinstance(rate, torch.Tensor) else rate
