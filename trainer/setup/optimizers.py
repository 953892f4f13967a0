"""Creates optimizers and learning-rate schedulers, and checks that Headway can step and save them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..checkpoints.model_state import OptimizerState
from ..errors import ConfigError
from ..loop.context import RunContext
from ..private_torch import inner_schedulers
from ..step.evaluation_weights import set_training_mode
from .program import Program, collect, public_attributes
from .scheduler_checks import check_schedulers, check_schedulers_of_other_classes
from .weight_init import shard_invariant_random


def make_optimizers(program: Program, ctx: RunContext, *, evaluates: bool, total_steps: int | None) -> None:
    """Create optimizers and schedulers over the models' parameters.

    Args:
        program: gets them as attributes.
        ctx: gets them.
        evaluates: whether there is validation data.
        total_steps: updates of the whole run, if known.

    Raises:
        ConfigError: there is no optimizer, one has a parameter of no model, needs a closure or has an inner one that
            no checkpoint would contain, or scheduler settings are invalid.
    """
    # Weights that it draws, under FSDP2, too.
    with shard_invariant_random():
        returned = program.configure_optimizers()
    collect(program, returned, "configure_optimizers", {"optimizer": Optimizer, "scheduler": LRScheduler})
    ctx.optimizers.clear()
    ctx.optimizers.update(public_attributes(program, Optimizer))
    _check_optimizers_of_other_classes(program)
    check_schedulers_of_other_classes(program, ctx)
    set_training_mode(ctx.optimizers.values())
    for name, optimizer in ctx.optimizers.items():
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise ConfigError(
                f"self.{name} is a {type(optimizer).__name__}, whose step() needs a closure that computes the loss "
                "again, but Headway computes the loss of an update once: use an optimizer that needs no closure"
            )
        if ctx.run_dir is not None:
            _check_inner_optimizers(name, optimizer)
            _check_state_dict(name, optimizer)
        _check_hooks(name, optimizer)
        # Raises now rather than at the first save: parameters of no model are neither averaged nor saved.
        OptimizerState(ctx.models, name, optimizer)
    ctx.lr_stepping.use(
        _outermost(public_attributes(program, LRScheduler)),
        interval=program.scheduler_interval,
        monitor=program.scheduler_monitor,
    )
    if not ctx.optimizers:
        raise ConfigError(
            f"configure_optimizers() of {ctx.name} made no optimizer: set self.optimizer = ..., or return it"
        )
    check_schedulers(ctx, evaluates=evaluates, total_steps=total_steps)
    if ctx.mesh.divides_weights:
        _check_grouping(ctx)


def _outermost(schedulers: Mapping[str, LRScheduler]) -> dict[str, LRScheduler]:
    """Drop schedulers inside another, such as a `SequentialLR`, which steps and saves them."""
    held: Iterable[LRScheduler] = schedulers.values()
    inside: set[LRScheduler] = set()
    while held := [inner for each in held for inner in inner_schedulers(each)]:
        inside.update(held)
    return {name: each for name, each in schedulers.items() if each not in inside}


def _check_optimizers_of_other_classes(program: Program) -> None:
    """Raise for an attribute that is used like an optimizer, but is none for torch: Headway would not step it."""
    for name, each in vars(program).items():
        looks = all(hasattr(each, attribute) for attribute in ("step", "zero_grad", "param_groups"))
        if looks and not isinstance(each, (Optimizer, type)):
            raise ConfigError(
                f"self.{name} is a {type(each).__name__}, which has step() and param_groups, but is no "
                "torch.optim.Optimizer, so that Headway would neither step nor save it: use an optimizer that is one, "
                "or derive the class from it"
            )


def _check_inner_optimizers(name: str, optimizer: Optimizer) -> None:
    """Check that the state of an optimizer inside another, as in SAM and Lookahead, is in the state dict of that one.

    Raises:
        ConfigError: it is not, so that a resumed run would begin without it.
    """
    if type(optimizer).state_dict is not Optimizer.state_dict:
        return
    for key, inner in vars(optimizer).items():
        if not isinstance(inner, Optimizer) or inner.state is optimizer.state:
            continue
        if type(inner) is torch.optim.SGD and not any(group["momentum"] for group in inner.param_groups):
            continue  # has no state
        raise ConfigError(
            f"self.{name} is a {type(optimizer).__name__} around another optimizer, {key}, whose state its "
            "state_dict() leaves out, so that a resumed run would begin without it: override state_dict() and "
            f"load_state_dict() of {type(optimizer).__name__} to add that of self.{key}"
        )


def _check_state_dict(name: str, optimizer: Optimizer) -> None:
    """Check that the state dict of an optimizer has the form of torch's, in which Headway finds the parameters.

    Raises:
        ConfigError: it has another.
    """
    if type(optimizer).state_dict is Optimizer.state_dict:
        return
    keys = list(optimizer.state_dict())
    if missing := [key for key in ("state", "param_groups") if key not in keys]:
        raise ConfigError(
            f"self.{name} is a {type(optimizer).__name__}, whose state_dict() has {', '.join(map(str, keys))}, but no "
            f"{' and no '.join(map(repr, missing))}, as that of torch.optim.Optimizer has, so that a checkpoint could "
            "not name its parameters: use another optimizer, override state_dict() and load_state_dict(), or train "
            "without run_dir"
        )


def _check_hooks(name: str, optimizer: Optimizer) -> None:
    """Raise for an optimizer without the hooks of torch's, such as Opacus' DPOptimizer."""
    try:
        optimizer.register_step_pre_hook(lambda *_: None).remove()
    except AttributeError as error:
        raise ConfigError(
            f"self.{name} is a {type(optimizer).__name__}, whose __init__() does not call that of torch.optim."
            "Optimizer, so that it can have no hooks: use another, or call super().__init__(...) in it. For clipped "
            'gradients of samples (DP-SGD), see "Gradients that you compute" in docs/models.md'
        ) from error


def _check_grouping(ctx: RunContext) -> None:
    """Raise for an optimizer that would update divided and whole parameters in one call, which torch cannot."""
    for name, optimizer in ctx.optimizers.items():
        for group in optimizer.param_groups:
            meshes = {each.device_mesh if isinstance(each, DTensor) else None for each in group["params"]}
            for setting in ("foreach", "fused"):
                if group.get(setting) and len(meshes) > 1:
                    raise ConfigError(
                        f"self.{name} has {setting}=True, which torch does not support for divided and whole "
                        f"parameters in one group, as with parallel.tp or with a scalar: leave {setting} out"
                    )
