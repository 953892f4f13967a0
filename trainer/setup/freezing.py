"""Freezing of parameters by patterns over their names, and the modes of modules that choose them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from ..errors import ConfigError


def freeze(models: Mapping[str, nn.Module], patterns: Sequence[str]) -> None:
    """Freeze parameters by name, and put modules of which these patterns freeze everything in evaluation mode.

    Modules that the user's code has frozen keep the mode that it gave them, as in plain PyTorch: a target network, for
    example, may have to normalize by the batch.

    Call it before sharding and before optimizers are created, which depend on `requires_grad`.

    Args:
        models: by the names of the attributes that hold them.
        patterns: shell patterns over whole names, such as "model.encoder.*", as in `TrainerConfig.freeze`. A pattern
            that begins with "!" unfreezes.

    Raises:
        ConfigError: a pattern matches no parameter, or nothing is left to train.
    """
    # A tied weight has several names: freezing one of them freezes it.
    named = [
        (f"{model}.{path}", parameter)
        for model, module in models.items()
        for path, parameter in module.named_parameters(remove_duplicate=False)
    ]
    frozen: set[nn.Parameter] = set()
    could_train = any(parameter.requires_grad for _, parameter in named)
    for pattern in patterns:
        glob = pattern.removeprefix("!")
        matched = [parameter for name, parameter in named if fnmatchcase(name, glob)]
        if not matched:
            raise ConfigError(_no_match_message(pattern, glob, [name for name, _ in named]))
        for parameter in matched:
            parameter.requires_grad_(pattern.startswith("!"))
        frozen = frozen.difference(matched) if pattern.startswith("!") else frozen.union(matched)
    if could_train and not any(parameter.requires_grad for _, parameter in named):
        raise ConfigError(
            f"freeze={list(patterns)} leaves nothing to train: remove a pattern, or unfreeze parameters with one that "
            'begins with "!", such as "!model.head.*"'
        )
    for module in models.values():
        _eval_frozen(module, frozen)


def call_own_train(models: Mapping[str, nn.Module]) -> None:
    """Call `train` of modules that override it and are in training mode, as a loop written by hand does.

    Some keep a part of themselves in evaluation mode by it, such as the norms of a pretrained backbone.
    """
    for model in models.values():
        for module in model.modules():
            if module.training and type(module).train is not nn.Module.train:
                module.train()


def _eval_frozen(module: nn.Module, frozen: set[nn.Parameter]) -> None:
    """Put the outermost modules of only frozen parameters in evaluation mode: no dropout, no new running statistics."""
    parameters = list(module.parameters())
    if parameters and frozen.issuperset(parameters):
        module.eval()
        return
    for child in module.children():
        _eval_frozen(child, frozen)


def _no_match_message(pattern: str, glob: str, names: list[str]) -> str:
    text = f"freeze: {pattern!r} matches no parameter; patterns match whole names"
    inside = [name for name in names if fnmatchcase(name, f"{glob}.*") or fnmatchcase(name, f"*.{glob}")]
    near = inside or difflib.get_close_matches(glob, names, n=3, cutoff=0.3) or names
    return f"{text}, such as {', '.join(near[:3])}"
