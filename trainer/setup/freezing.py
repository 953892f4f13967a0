"""Which parameters are trained: patterns over their names, and modules in which nothing is."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from ..errors import ConfigError


def freeze(models: Mapping[str, nn.Module], patterns: Sequence[str]) -> None:
    """Freezes parameters by name, and puts every module that has nothing left to train in evaluation mode for good.

    Call it before sharding, which needs to know what gets a gradient, and before optimizers are made.

    Args:
        models: by the names of the attributes that hold them.
        patterns: as `TrainerConfig.freeze` has them: shell patterns over whole names, such as "model.encoder.*". One
            that begins with "!" takes parameters back that an earlier one has frozen.

    Raises:
        ConfigError: a pattern matches no parameter, with the nearest names; or nothing is left to train.
    """
    # With a name for every place of a tied weight: freezing one of them freezes it.
    named = [
        (f"{model}.{path}", parameter)
        for model, module in models.items()
        for path, parameter in module.named_parameters(remove_duplicate=False)
    ]
    could_train = any(parameter.requires_grad for _, parameter in named)
    for pattern in patterns:
        glob = pattern.removeprefix("!")
        matched = [parameter for name, parameter in named if fnmatchcase(name, glob)]
        if not matched:
            raise ConfigError(_no_match_message(pattern, glob, [name for name, _ in named]))
        for parameter in matched:
            parameter.requires_grad_(pattern.startswith("!"))
    if could_train and not any(parameter.requires_grad for _, parameter in named):
        raise ConfigError(
            f"freeze={list(patterns)} leaves nothing to train: take a pattern out, or take parameters back with one "
            'that begins with "!", as "!model.head.*"'
        )
    for module in models.values():
        _eval_frozen(module)


def _eval_frozen(module: nn.Module) -> None:
    """Puts the outermost modules that are frozen as a whole in evaluation mode: no dropout, no new running means."""
    parameters = list(module.parameters())
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        module.eval()
        return
    for child in module.children():
        _eval_frozen(child)


def _no_match_message(pattern: str, glob: str, names: list[str]) -> str:
    text = f"freeze: {pattern!r} matches no parameter; patterns match whole names"
    inside = [name for name in names if fnmatchcase(name, f"{glob}.*") or fnmatchcase(name, f"*.{glob}")]
    near = inside or difflib.get_close_matches(glob, names, n=3, cutoff=0.3) or names
    return f"{text}, such as {', '.join(near[:3])}"
