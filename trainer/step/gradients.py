"""Gradient norms, clipping, norm groups by parameter name, and the check for unused parameters."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from ..checkpoints.model_state import unwrapped_state_dict
from ..distributed.ddp import ReplicatedModule
from ..distributed.dtensor import to_full_tensor
from ..distributed.world import World
from ..errors import ConfigError, StepError
from ..private_torch import foreach_mul_, foreach_norm, has_gradient_hooks

_MOST_NAMES = 8


def named_parameters(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield all parameters as "<model>.<name>", named as in the user's modules."""
    for name, model in models.items():
        for path, value in unwrapped_state_dict(model, keep_vars=True).items():
            if isinstance(value, nn.Parameter):
                yield f"{name}.{path}", value


def norm_groups(models: Mapping[str, nn.Module], patterns: Sequence[str]) -> dict[str, set[torch.Tensor]]:
    """Return the parameters whose names match each shell pattern.

    Raises:
        ConfigError: a pattern matches no parameter.
    """
    groups: dict[str, set[torch.Tensor]] = {}
    for pattern in patterns:
        groups[pattern] = {parameter for name, parameter in named_parameters(models) if fnmatchcase(name, pattern)}
        if not groups[pattern]:
            names = [name for name, _ in named_parameters(models)]
            raise ConfigError(
                f"grad_norm_groups: {pattern!r} matches no parameter; patterns match whole names, such as "
                f"{', '.join(names[:_MOST_NAMES])}"
            )
    return groups


def hook_advice(models: Mapping[str, nn.Module]) -> str:
    """Return what to do about an optimizer that steps in a hook during the backward pass; "" without such hooks."""
    if not any(has_gradient_hooks(parameter) for _, parameter in named_parameters(models)):
        return ""
    return (
        "; or a hook of a parameter, such as of register_post_accumulate_grad_hook, steps an optimizer itself: remove "
        "the hook, and set one optimizer of all parameters in configure_optimizers()"
    )


def unused_names(models: Mapping[str, nn.Module], unused: set[torch.Tensor]) -> list[str]:
    """Return the names of those of the models' parameters that are in `unused`."""
    return [name for name, parameter in named_parameters(models) if parameter in unused]


def check_unused_alike(names_by_rank: Sequence[Sequence[str]]) -> None:
    """Check that the same parameters of sharded models got no gradient on all ranks.

    Raises:
        StepError: they differ, and FSDP2 has added gradients of different parameters.
    """
    if differing := sorted(set().union(*names_by_rank) - set(names_by_rank[0]).intersection(*names_by_rank[1:])):
        raise StepError(
            f"{_list(differing)} got no gradient on some ranks in the first update, and a sharded model needs those of "
            "the same parameters on all: set parallel.find_unused_parameters=True"
        )


def check_equal_on_ranks(
    models: Mapping[str, nn.Module], replicated: set[nn.Parameter], world: World, *, has_stepped: bool
) -> None:
    """Check that replicated parameters are equal on all ranks. Every rank must call this; waits for the device.

    Only their norms are compared, with room for devices that round differently.

    Args:
        models: by name.
        replicated: the parameters to compare.
        world: the ranks that have them.
        has_stepped: whether an optimizer has stepped since the ranks had the same weights.

    Raises:
        StepError: they differ.
    """
    named = [(name, parameter) for name, parameter in named_parameters(models) if parameter in replicated]
    if world.size == 1 or not named:
        return
    norms = torch.stack([norm.float() for norm in foreach_norm([parameter.detach() for _, parameter in named])])
    of_ranks = world.all_gather(norms).view(world.size, -1)
    largest = of_ranks.amax(0)
    differ = (largest - of_ranks.amin(0) > 1e-4 * largest).tolist()
    if names := [name for (name, _), differs in zip(named, differ, strict=True) if differs]:
        if has_stepped:
            raise StepError(
                f"{_list(names)} differ between the ranks after the first optimizer of this step: its loss reached "
                "only a part of the model, and DDP waited for the gradients of the rest. Let the step call a method of "
                f"the model in place of the model, and Headway reduces the gradients{hook_advice(models)}"
            )
        raise StepError(
            f"{_list(names)} differ between the ranks after the first forward pass, which has changed them: to "
            "initialize them from data, call the model once with a batch in configure_models(); or call "
            f"torch.distributed.broadcast(parameter.data, src=0) after the change, on every rank{hook_advice(models)}"
        )


def report_unused(models: Mapping[str, nn.Module], unused: set[torch.Tensor], *, is_main: bool) -> None:
    """Warn about parameters of an optimizer that got no gradient.

    Raises:
        StepError: DDP waits for the gradient of every parameter, and would not reduce others.
    """
    names = unused_names(models, unused)
    if not names:
        return
    what = _list(names)
    waiting = [
        each
        for each in models.values()
        if isinstance(each, ReplicatedModule) and not each.leaves_gradients and not each.find_unused_parameters
    ]
    if any(unused.intersection(each.parameters()) for each in waiting):
        raise StepError(
            f"{what} got no gradient in the first update, but DDP waits for the gradient of every parameter: remove "
            "them from the model, freeze them, or set parallel.find_unused_parameters=True"
        )
    if is_main:
        warnings.warn(
            f"{what} got no gradient in the first update of their optimizer: freeze parameters that are not to be "
            "trained, or check that the loss depends on them",
            stacklevel=2,
        )


def _list(names: Sequence[str]) -> str:
    return f"{', '.join(names[:_MOST_NAMES])}{f' and {len(names) - _MOST_NAMES} more' if names[_MOST_NAMES:] else ''}"


def report_shared(models: Mapping[str, nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Warn about parameters that several optimizers update in the same step."""
    held = Counter(parameter for each in optimizers for group in each.param_groups for parameter in group["params"])
    if names := [name for name, parameter in named_parameters(models) if held[parameter] > 1]:
        warnings.warn(
            f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''} is in several optimizers, and each "
            "updates it: give it to one, or call self.backward(loss) and self.step(optimizer) in training_step",
            stacklevel=2,
        )


def total_norm(gradients: list[Tensor]) -> Tensor:
    """Return the total norm of one or more gradients, bitwise equal to `get_total_norm`.

    Every rank must call this: norms of sharded gradients are reduced.
    """
    if not _are_alike(gradients):
        norms = [
            to_full_tensor(get_total_norm([dense_values(each) for each in alike])) for alike in _by_mesh(gradients)
        ]
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    with torch.no_grad():
        norm: Tensor = torch.linalg.vector_norm(torch.stack(list(foreach_norm(gradients))))
    return norm


def scale_gradients(gradients: Iterable[Tensor], factor: float) -> None:
    """Multiply gradients by a number, in place."""
    for alike in _by_mesh(gradients):
        foreach_mul_(alike, factor)


def clip_norm(parameters: Sequence[Tensor], limit: float, norm: Tensor) -> None:
    """Scale gradients in place so that their norm is at most the limit; bitwise equal to `clip_grads_with_norm_`."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not _are_alike(gradients):
        for alike in _by_mesh([gradient for gradient in gradients if not gradient.is_sparse]):
            held = {id(gradient) for gradient in alike}
            clip_grads_with_norm_([p for p in parameters if id(p.grad) in held], limit, norm)
        sparse = [gradient for gradient in gradients if gradient.is_sparse]
        # Not coalesced: scaling and summing repeated rows commute.
        for gradient in sparse:
            gradient.mul_((limit / (norm + 1e-6)).clamp(max=1.0).to(gradient.device))
        return
    with torch.no_grad():
        foreach_mul_(gradients, (norm + 1e-6).reciprocal_().mul_(limit).clamp_(max=1.0))


def clip_value(parameters: Sequence[Tensor], limit: float) -> None:
    """Clip every element of the parameters' gradients to plus or minus the limit, in place."""
    clip_grad_value_([p for p in parameters if p.grad is None or not p.grad.is_sparse], limit)
    for p in parameters:
        if p.grad is not None and p.grad.is_sparse:
            p.grad = p.grad.coalesce()
            p.grad.values().clamp_(-limit, limit)


def dense_values(gradient: Tensor) -> Tensor:
    """Return the gradient, or the values of a sparse one."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _by_mesh(gradients: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group gradients by the ranks over which they are sharded: torch combines only those of one mesh."""
    groups: dict[DeviceMesh | None, list[Tensor]] = {}
    for gradient in gradients:
        groups.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(gradient)
    return list(groups.values())


def _are_alike(gradients: list[Tensor]) -> bool:
    """Return whether all are dense plain tensors of one dtype on one device; faster than torch's grouping."""
    device, dtype = gradients[0].device, gradients[0].dtype
    # A loop is twice as fast as `all`.
    for gradient in gradients:  # noqa: SIM110
        if type(gradient) is not Tensor or gradient.dtype != dtype or gradient.device != device or gradient.is_sparse:
            return False
    return True
