"""Checks of learning rate schedulers before the first update."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator

from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..errors import ConfigError
from ..loop.context import RunContext
from ..private_torch import inner_schedulers

_SMALLEST_FACTOR = 1e-6


def check_schedulers(ctx: RunContext, *, evaluates: bool, total_steps: int | None) -> None:
    """Check that each scheduler changes a learning rate of the run, and warn of one that seems to count epochs.

    Args:
        ctx: with optimizers and schedulers.
        evaluates: whether there is validation data.
        total_steps: updates of the whole run, if known.

    Raises:
        ConfigError: a scheduler belongs to another optimizer, or waits for evaluations that never come.
    """
    groups = {id(group) for optimizer in ctx.optimizers.values() for group in optimizer.param_groups}
    after_evaluations = ctx.lr_stepping.at("evaluation")
    for name, scheduler in ctx.lr_stepping.schedulers.items():
        of = getattr(scheduler, "optimizer", None)
        # An optimizer that wraps another shares its groups.
        if of is not None and not any(id(group) in groups for group in of.param_groups):
            raise ConfigError(
                f"self.{name} is a scheduler of an optimizer that is not an attribute of {ctx.name}, so it would "
                f"change no learning rate: create it with {' or '.join(f'self.{each}' for each in ctx.optimizers)}"
            )
        if not evaluates and (isinstance(scheduler, ReduceLROnPlateau) or scheduler in after_evaluations):
            raise ConfigError(
                f"self.{name} is a {type(scheduler).__name__} that steps after evaluations, but there is no validation "
                "data: return (train, validation) from configure_dataloaders(), or use a scheduler that steps after "
                "updates or epochs"
            )
    if ctx.world.is_main and total_steps is not None:
        _warn_of_epochs(ctx, total_steps)


def _warn_of_epochs(ctx: RunContext, total_steps: int) -> None:
    """Warn of schedulers that step after each update, but whose settings fit the number of epochs."""
    max_epochs = ctx.config.max_epochs
    by_step = ctx.lr_stepping.at("step")
    for name, outermost in ctx.lr_stepping.schedulers.items():
        for scheduler in _all_in(outermost) if outermost in by_step else ():
            kind, problem = type(scheduler).__name__, None
            if isinstance(scheduler, lr_scheduler.ExponentialLR):
                if scheduler.gamma**total_steps < _SMALLEST_FACTOR:
                    problem = f"gamma={scheduler.gamma:g} makes the learning rate {scheduler.gamma**total_steps:.0e} of"
                    problem += f" the first after the {total_steps} updates of the run"
            elif max_epochs is not None and (setting := _length(scheduler)) is not None:
                field, length = setting
                if length <= max_epochs < total_steps:
                    problem = f"{field} is reached after {length} of the {total_steps} updates of the run"
            if problem is not None:
                warnings.warn(
                    f"self.{name} steps after every update, and {problem}: if the {kind} is to count epochs, set "
                    'scheduler_interval = "epoch"',
                    stacklevel=2,
                )


def _length(scheduler: LRScheduler) -> tuple[str, int] | None:
    """Return the setting that counts a scheduler's steps, and its value; None for a warm-up and unknown ones."""
    if isinstance(scheduler, lr_scheduler.MultiStepLR):
        return "the last of its milestones", max(scheduler.milestones, default=0)
    for kind, field in (
        (lr_scheduler.StepLR, "step_size"),
        (lr_scheduler.CosineAnnealingLR, "T_max"),
        (lr_scheduler.CosineAnnealingWarmRestarts, "T_0"),
        (lr_scheduler.PolynomialLR, "total_iters"),
    ):
        if isinstance(scheduler, kind):
            return field, int(getattr(scheduler, field))
    return None


def _all_in(scheduler: LRScheduler) -> Iterator[LRScheduler]:
    """Yield a scheduler and those inside it, such as in a `SequentialLR`."""
    yield scheduler
    for inner in inner_schedulers(scheduler):
        yield from _all_in(inner)


def check_schedulers_of_other_classes(program: object, ctx: RunContext) -> None:
    """Check attributes that hold an optimizer of the run and have `step()`, but are no `LRScheduler`.

    Raises:
        ConfigError: one wraps an `LRScheduler`, as Accelerate's does, so that its author expects Headway to step it.
    """
    for name, each in vars(program).items():
        if isinstance(each, (LRScheduler, Optimizer, type)) or not callable(getattr(each, "step", None)):
            continue
        held = list(vars(each).values()) if hasattr(each, "__dict__") else []
        kind = type(each).__name__
        if wrapped := [value for value in held if isinstance(value, LRScheduler)]:
            raise ConfigError(
                f"self.{name} is a {kind} around a {type(wrapped[0]).__name__}, but no LRScheduler of torch, so that "
                f"Headway would not step it: set the {type(wrapped[0]).__name__} itself, without accelerator.prepare()"
            )
        holds_optimizer = any(value is optimizer for value in held for optimizer in ctx.optimizers.values())
        if holds_optimizer and ctx.world.is_main and not _is_used(type(program), name):
            warnings.warn(
                f"self.{name} is a {kind}, which has an optimizer and step(), but is no LRScheduler of torch: Headway "
                "neither steps nor saves it. Derive it from LRScheduler, or step it in on_step_end() and save it in "
                "state_dict() of a callback",
                stacklevel=2,
            )


def _is_used(cls: type, name: str) -> bool:
    """Return whether a method of a trainer's class uses an attribute, except the method that sets it."""
    functions = [
        value
        for base in cls.__mro__
        for key, value in vars(base).items()
        if inspect.isfunction(value) and key != "configure_optimizers"
    ]
    return any(name in function.__code__.co_names for function in functions)
