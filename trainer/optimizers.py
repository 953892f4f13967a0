"""Optimizers with the settings that most models want: matrices alone decay, kernels are fused where they can be."""

from __future__ import annotations

import difflib
import importlib
import inspect
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from .errors import ConfigError

# Those whose weight may have two dimensions; that of the other norms has one, which is enough to tell.
_NORMS = (nn.LayerNorm, nn.RMSNorm)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_FUSED = ("cpu", "cuda")


def decay_groups(model: nn.Module, weight_decay: float, *, decay_embeddings: bool = True) -> list[dict[str, Any]]:
    """Splits the trainable parameters of a model into those that decay and those that do not, for any optimizer.

    Norms, biases and everything else with less than two dimensions do not decay. Each parameter is in one group, once,
    also a tied weight: it decays only if it would in each of its places. Shapes are those of the whole parameters, so
    sharded models are split like any other.

    Args:
        model: as in `configure_optimizers`: sharded, wrapped and compiled or not. Frozen parameters are left out.
        weight_decay: of the group "decay".
        decay_embeddings: whether the weights of embeddings decay.

    Returns:
        Groups named "decay" and "no_decay", so that the log has `lr/optimizer/decay`; an empty one is left out.

    Raises:
        ConfigError: nothing in the model can be trained.

    Example:
        >>> groups = optimizers.decay_groups(torch.nn.Linear(4, 4), weight_decay=0.1)
        >>> [(group["name"], group["weight_decay"], len(group["params"])) for group in groups]
        [('decay', 0.1, 1), ('no_decay', 0.0, 1)]
    """
    decays: dict[nn.Parameter, bool] = {}
    for module in model.modules():
        spared = isinstance(module, _NORMS) or (not decay_embeddings and isinstance(module, _EMBEDDINGS))
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.requires_grad:
                here = not spared and parameter.dim() >= 2 and "bias" not in name.split("_")
                decays[parameter] = decays.get(parameter, True) and here
    if not decays:
        raise ConfigError(
            f"{type(model).__name__} has no parameter that can be trained: requires_grad is False for all"
        )
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
    """Makes an AdamW over `decay_groups`, by one fused kernel per group where there is one.

    The fused kernels (CPU and CUDA) differ from PyTorch's others by rounding alone, and a run is as repeatable with
    them. On other devices, and for what is not floating point, PyTorch's own choice holds: foreach where it pays.

    Args:
        model: as in `configure_optimizers`.
        learning_rate: the peak, if there is a schedule.
        weight_decay: of matrices, per update and unit of learning rate.
        betas: how slowly the first and the second moment change.
        eps: keeps the update of a parameter whose gradient is near zero from growing without bound.
        decay_embeddings: whether the weights of embeddings decay.

    Raises:
        ConfigError: nothing in the model can be trained.

    Example:
        >>> optimizer = optimizers.adamw(torch.nn.Linear(4, 4), learning_rate=3e-4, weight_decay=0.1)
    """
    groups = decay_groups(model, weight_decay, decay_embeddings=decay_embeddings)
    parameters = [parameter for group in groups for parameter in group["params"]]
    fused = all(each.device.type in _FUSED and torch.is_floating_point(each) for each in parameters)
    # None, and not False, which would forbid foreach as well.
    return AdamW(groups, lr=learning_rate, betas=betas, eps=eps, fused=True if fused else None)


def named(name: str, model: nn.Module, *, decay_embeddings: bool = True, **settings: Any) -> Optimizer:
    """Makes the optimizer of a name over a model's trainable parameters: for a config that chooses among several.

    Where weights decay, by `settings` or by the optimizer's own default, they do so in `decay_groups`.

    Args:
        name: of a class of `torch.optim`, such as "SGD"; or one of another package, "package.module.Class".
        model: as in `configure_optimizers`.
        decay_embeddings: whether the weights of embeddings decay.
        settings: what the class takes besides the parameters: `lr`, `weight_decay`, ...

    Raises:
        ConfigError: there is no such optimizer, it cannot step by itself, or it does not take these settings.

    Example:
        >>> optimizer = optimizers.named("SGD", torch.nn.Linear(4, 4), lr=0.1, momentum=0.9)
    """
    made_by = _class_of(name)
    takes = inspect.signature(made_by).parameters
    default = takes["weight_decay"].default if "weight_decay" in takes else 0.0
    parameters: list[Any] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if weight_decay := settings.get("weight_decay", default):
        parameters = decay_groups(model, weight_decay, decay_embeddings=decay_embeddings)
    try:
        optimizer: Optimizer = made_by(parameters, **settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"optimizer {name!r} cannot be made with {settings}: {error}. It takes {', '.join(list(takes)[1:])}"
        ) from error
    return optimizer


def _class_of(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        there = vars(importlib.import_module(module or "torch.optim"))
    except ImportError as error:
        raise ConfigError(
            f"optimizer {name!r} is to be found in {module}, which cannot be imported: {error}"
        ) from error
    known = [key for key, each in there.items() if inspect.isclass(each) and issubclass(each, Optimizer)]
    if attribute not in known or there[attribute] is Optimizer:
        nearest = difflib.get_close_matches(attribute, set(known) - {"Optimizer"}, n=1, cutoff=0.0)
        raise ConfigError(
            f"there is no optimizer {attribute!r} in {module or 'torch.optim'}"
            + (f"; did you mean {nearest[0]!r}?" if nearest else "")
        )
    closure = inspect.signature(there[attribute].step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"optimizer {name!r} computes the loss several times in a step, by a function that nobody gives it"
        )
    return there[attribute]
