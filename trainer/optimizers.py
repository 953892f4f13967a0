"""Optimizers with good defaults: only matrices decay, and kernels are fused if supported."""

from __future__ import annotations

import difflib
import importlib
import inspect
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from .errors import ConfigError

# Norms whose weight may have two dimensions; those of other norms have one, so they never decay.
_NORMS = (nn.LayerNorm, nn.RMSNorm)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_FUSED = ("cpu", "cuda")


def decay_groups(model: nn.Module, weight_decay: float, *, decay_embeddings: bool = True) -> list[dict[str, Any]]:
    """Split a model's trainable parameters into groups with and without weight decay, for any optimizer.

    Norms, biases and other parameters with fewer than two dimensions do not decay. A tied weight is in one group, once,
    and decays only if it would in each of its modules. Sharded models are split by the full shapes.

    Args:
        model: as in `configure_optimizers`; may be sharded, wrapped and compiled. Frozen parameters are left out.
        weight_decay: of the group "decay".
        decay_embeddings: whether the weights of embeddings decay.

    Returns:
        Groups named "decay" and "no_decay", so that the log has `lr/optimizer/decay`; an empty group is left out.

    Raises:
        ConfigError: the model has no trainable parameter.

    Example:
        >>> groups = optimizers.decay_groups(torch.nn.Linear(4, 4), weight_decay=0.1)
        >>> [(group["name"], group["weight_decay"], len(group["params"])) for group in groups]
        [('decay', 0.1, 1), ('no_decay', 0.0, 1)]
    """
    decays: dict[nn.Parameter, bool] = {}
    for module in model.modules():
        excluded = isinstance(module, _NORMS) or (not decay_embeddings and isinstance(module, _EMBEDDINGS))
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.requires_grad:
                here = not excluded and parameter.dim() >= 2 and "bias" not in name.split("_")
                decays[parameter] = decays.get(parameter, True) and here
    if not decays:
        raise ConfigError(f"{type(model).__name__} has no trainable parameter: requires_grad is False for all of them")
    groups = [
        {"params": [p for p, decay in decays.items() if decay], "weight_decay": weight_decay, "name": "decay"},
        {"params": [p for p, decay in decays.items() if not decay], "weight_decay": 0.0, "name": "no_decay"},
    ]
    return [group for group in groups if group["params"]]


def adamw(
    model: nn.Module,
    learning_rate: float,
    weight_decay: float = 0.01,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    decay_embeddings: bool = True,
) -> AdamW:
    """Return an AdamW over `decay_groups`, with fused kernels if supported.

    The fused kernels (CPU and CUDA) differ from PyTorch's others only by rounding, and are equally reproducible. For
    other devices and parameters that are not floating point, PyTorch chooses.

    Args:
        model: as in `configure_optimizers`.
        learning_rate: the peak, if there is a schedule.
        weight_decay: of matrices, per update and unit of learning rate.
        betas: decay rates of the first and second moment.
        eps: added to the denominator, which bounds updates of parameters with gradients near zero.
        decay_embeddings: whether the weights of embeddings decay.

    Raises:
        ConfigError: the model has no trainable parameter.

    Example:
        >>> optimizer = optimizers.adamw(torch.nn.Linear(4, 4), learning_rate=3e-4, weight_decay=0.1)
    """
    groups = decay_groups(model, weight_decay, decay_embeddings=decay_embeddings)
    parameters = [parameter for group in groups for parameter in group["params"]]
    fused = all(each.device.type in _FUSED and torch.is_floating_point(each) for each in parameters)
    fused = fused and len({isinstance(each, DTensor) for each in parameters}) == 1
    # Not False, which would also disable foreach.
    return AdamW(groups, lr=learning_rate, betas=betas, eps=eps, fused=True if fused else None)


def named(name: str, model: nn.Module, *, decay_embeddings: bool = True, **settings: Any) -> Optimizer:
    """Return an optimizer by name over a model's trainable parameters, for configs that choose among several.

    With weight decay, from `settings` or the optimizer's default, the parameters are split by `decay_groups`.

    Args:
        name: a class of `torch.optim`, such as "SGD"; or of another package, "package.module.Class".
        model: as in `configure_optimizers`.
        decay_embeddings: whether the weights of embeddings decay.
        settings: further arguments of the class: `lr`, `weight_decay`, ...

    Raises:
        ConfigError: there is no such optimizer, it needs a closure, or it does not take these settings.

    Example:
        >>> optimizer = optimizers.named("SGD", torch.nn.Linear(4, 4), lr=0.1, momentum=0.9)
    """
    optimizer_class = _class_of(name)
    arguments = inspect.signature(optimizer_class).parameters
    default = arguments["weight_decay"].default if "weight_decay" in arguments else 0.0
    parameters: list[Any] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if weight_decay := settings.get("weight_decay", default):
        parameters = decay_groups(model, weight_decay, decay_embeddings=decay_embeddings)
    try:
        optimizer: Optimizer = optimizer_class(parameters, **settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"optimizer {name!r} cannot be created with {settings}: {error}. It takes {', '.join(list(arguments)[1:])}"
        ) from error
    return optimizer


def _class_of(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        members = vars(importlib.import_module(module or "torch.optim"))
    except ImportError as error:
        raise ConfigError(f"optimizer {name!r}: {module} cannot be imported: {error}") from error
    known = [key for key, each in members.items() if inspect.isclass(each) and issubclass(each, Optimizer)]
    if attribute not in known or members[attribute] is Optimizer:
        nearest = difflib.get_close_matches(attribute, set(known) - {"Optimizer"}, n=1, cutoff=0.0)
        raise ConfigError(
            f"there is no optimizer {attribute!r} in {module or 'torch.optim'}"
            + (f"; did you mean {nearest[0]!r}?" if nearest else "")
        )
    closure = inspect.signature(members[attribute].step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"optimizer {name!r} needs a closure that recomputes the loss in each step, which is not supported"
        )
    return members[attribute]
