"""Tensor parallelism: layers that are divided over ranks, by a plan of the user's or of a Hugging Face model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.utils.parametrize import is_parametrized

from ..errors import ConfigError

_STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
}
"""The styles of Hugging Face's plans, as torch's."""

_MOST_NAMES = 5

Plan = Mapping[str, ParallelStyle]
"""Styles by module names, such as "model.layers.*.up": a name begins with the model's, and `*` is one part of it."""


def divide_layers(models: Mapping[str, nn.Module], plan: Plan, mesh: DeviceMesh) -> None:
    """Divide layers over the ranks of a mesh, in place. Every rank must call this.

    Args:
        models: by name, on the meta device.
        plan: from the trainer; where it is empty, each model's own.
        mesh: of one dimension.

    Raises:
        ConfigError: there is no plan, it does not fit the models, or it divides a shared weight in one place only.
    """
    plan = dict(plan) or {name: style for model in models for name, style in _own_plan(model, models[model]).items()}
    if not plan:
        raise ConfigError(
            f"parallel.tp={mesh.size()} divides layers by a plan, and {', '.join(models)} brings none: return one from "
            'configure_tensor_parallel(), such as {"model.blocks.*.up": ColwiseParallel(), "model.blocks.*.down": '
            "RowwiseParallel()}, with the styles of torch.distributed.tensor.parallel"
        )
    modules = {f"{name}.{path}".rstrip("."): each for name, model in models.items() for path, each in _named(model)}
    shared = [places for model in models.values() for places in _shared_weights(model)]
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle):
            raise ConfigError(
                f"configure_tensor_parallel: {pattern!r} is {style!r}, which is no ParallelStyle of "
                "torch.distributed.tensor.parallel, such as ColwiseParallel()"
            )
        found = [module for name, module in modules.items() if _matches(name, pattern)]
        if not found:
            raise ConfigError(
                f"configure_tensor_parallel: {pattern!r} matches no module; names begin with the attribute of the "
                f"model, such as {', '.join(list(modules)[1:9])}"
            )
        for module in found:
            if is_parametrized(module):
                name = next(name for name, each in modules.items() if each is module)
                raise ConfigError(
                    f"configure_tensor_parallel: {name} computes its weight from others ({type(module).__name__}), "
                    "which torch cannot divide: leave it out of the plan"
                )
            trains = [parameter.requires_grad for parameter in module.parameters()]
            # None: there are no values to send.
            parallelize_module(module, mesh, style, src_data_rank=None)
            for parameter, required in zip(module.parameters(), trains, strict=True):
                parameter.requires_grad_(required)
    for places in shared:
        _share_again(places, modules)


def add_division_advice(error: BaseException, models: Mapping[str, nn.Module]) -> None:
    """Add what to change in the plan, or the layers of which ranks have uneven parts, to an error of torch."""
    if not isinstance(error, RuntimeError):
        return
    if "mixed torch.Tensor and DTensor" in str(error):
        error.add_note(
            "with parallel.tp, a weight that the plan divides is a DTensor, which only the forward of its own layer "
            "may use: leave a layer whose weight is used elsewhere out of the plan"
        )
        return
    if not any(words in str(error) for words in ("size", "dim", "shape")):
        return
    uneven = [
        f"{name}.{path} {tuple(weight.shape)}"
        for name, model in models.items()
        for path, weight in model.named_parameters()
        if isinstance(weight, DTensor) and _is_uneven(weight)
    ]
    if uneven:
        more = f" and {len(uneven) - _MOST_NAMES} more" if uneven[_MOST_NAMES:] else ""
        error.add_note(
            f"parallel.tp does not divide these evenly: {', '.join(uneven[:_MOST_NAMES])}{more}. Choose sizes that it "
            "divides, or leave the layers out of the plan"
        )
    else:
        error.add_note(
            "with parallel.tp, a layer with ColwiseParallel() returns this rank's part of its output, and one with "
            "RowwiseParallel() expects such a part: pair them in configure_tensor_parallel(), or use "
            "ColwiseParallel(output_layouts=Replicate()) and RowwiseParallel(input_layouts=Replicate()). A norm or "
            "another layer between them would need the whole width"
        )


def _is_uneven(weight: DTensor) -> bool:
    mesh = weight.device_mesh
    names = mesh.mesh_dim_names or ()
    return any(
        name == "tp" and placement.is_shard() and weight.shape[placement.dim] % mesh.size(at)  # type: ignore[attr-defined]
        for at, (name, placement) in enumerate(zip(names, weight.placements, strict=True))
    )


def _own_plan(name: str, model: nn.Module) -> dict[str, ParallelStyle]:
    """Return the plan that a Hugging Face model has for itself."""
    own: Any = getattr(model, "_tp_plan", None)
    if not isinstance(own, Mapping):
        return {}
    if unknown := {style for style in own.values() if style not in _STYLES}:
        raise ConfigError(
            f"parallel.tp: the plan of {name}, a {type(model).__name__}, has styles that Headway does not know "
            f"({', '.join(sorted(map(str, unknown)))}): return a plan from configure_tensor_parallel()"
        )
    patterns = {f"{name}.{pattern}": _STYLES[style]() for pattern, style in own.items()}
    names = [f"{name}.{path}" for path, _ in _named(model)]
    # Plans are for a family of models, of which some lack a layer.
    return {pattern: style for pattern, style in patterns.items() if any(_matches(each, pattern) for each in names)}


def _named(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(model.named_modules())


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _shared_weights(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return the places of each parameter that several modules have."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((module, name))
    return [each for each in places.values() if len(each) > 1]


def _share_again(places: Sequence[tuple[nn.Module, str]], modules: Mapping[str, nn.Module]) -> None:
    """Make the divided copies of a shared weight one weight again."""
    first, *others = weights = [module.get_parameter(name) for module, name in places]
    layouts = [tuple(weight.placements) if isinstance(weight, DTensor) else None for weight in weights]
    if any(layout != layouts[0] for layout in layouts):
        names = {id(module): name for name, module in modules.items()}
        raise ConfigError(
            f"{' and '.join(f'{names[id(module)]}.{name}' for module, name in places)} are one weight, and the plan "
            "for parallel.tp divides them differently: an embedding with RowwiseParallel(input_layouts=Replicate()) "
            "and a linear layer with ColwiseParallel() divide it alike"
        )
    for (module, name), weight in zip(places[1:], others, strict=True):
        if weight is not first:
            module.register_parameter(name, first)
