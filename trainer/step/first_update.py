"""Checks of the first update of each optimizer, which find mistakes that would otherwise be silent."""

from __future__ import annotations

import warnings
import zlib
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..distributed.ddp import ReplicatedModule
from ..distributed.dtensor import to_local, unwrap
from ..distributed.fsdp import reduce_unused, sharded_roots
from ..distributed.world import World
from ..errors import StepError
from ..loop.context import RunContext
from ..private_torch import foreach_norm, version_of
from .gradients import dense_values, hook_advice, named_parameters

_MOST_NAMES = 8


class FirstUpdateCheck:
    """Checks the first update of each optimizer.

    Args:
        ctx: the run's models and optimizers.
    """

    def __init__(self, ctx: RunContext) -> None:
        self._models, self._world, self._loss_world = ctx.models, ctx.world, ctx.mesh.loss
        self._tensor_world = ctx.mesh.tensor
        self._optimizers = list(ctx.optimizers.values())
        self._finds_unused = ctx.config.parallel.find_unused_parameters
        self._unchecked = set(self._optimizers)
        self._versions: dict[nn.Parameter, int | None] | None = None
        self._were_training: dict[str, bool] = {}
        self._trained: set[nn.Module] = set()

    @property
    def is_due(self) -> bool:
        """Whether an optimizer has not made its first update yet."""
        return bool(self._unchecked)

    def before_forward(self) -> None:
        """Remember the gradients, and which models are in training mode, before the user's part of an update."""
        if not self._unchecked:
            self._versions = None
            return
        self._versions = _gradient_versions(self._optimizers)
        self._were_training = {name: model.training for name, model in self._models.items()}
        self._trained = _trained_modules(self._models, self._optimizers)

    def has_other_gradients(self) -> bool:
        """Whether gradients have changed since `before_forward`; asked once, since a backward pass changes them."""
        before, self._versions = self._versions, None
        if before is None:
            return False
        now = _gradient_versions(self._optimizers)
        # Parameters that were added since are not compared.
        return any(now.get(parameter, version) != version for parameter, version in before.items())

    def warn_of_evaluation_mode(self) -> None:
        """Warn about models that `training_step` left, or that are trained, in evaluation mode."""
        if self._unchecked and self._world.is_main:
            _warn_of_evaluation_mode(self._models, self._were_training, self._trained)

    def check_gradients(
        self, optimizers: Sequence[Optimizer], replicated: Sequence[ReplicatedModule], *, has_stepped: bool
    ) -> None:
        """Check the gradients before the first step of these optimizers. Every rank must call this.

        Args:
            optimizers: about to step.
            replicated: models whose parameters DDP keeps equal on all ranks.
            has_stepped: whether another optimizer has already stepped in this update.

        Raises:
            StepError: a parameter has no gradient, or replicated parameters or their gradients differ between ranks.
        """
        first = self._unchecked.intersection(optimizers)
        self._unchecked -= first
        forgotten = {
            p for o in first for group in o.param_groups for p in group["params"] if p.requires_grad and p.grad is None
        }
        report_unused(self._models, forgotten, is_main=self._world.is_main)
        reduced = {p for each in replicated for p in each.reduced}
        check_equal_on_ranks(self._models, reduced, self._loss_world, has_stepped=has_stepped)
        if self._tensor_world.size > 1:
            check_undivided_gradients(self._models, first, self._tensor_world)
        sharded = {name: model for name, model in self._models.items() if sharded_roots(model)}
        if sharded and not self._finds_unused:
            names = unused_names(sharded, forgotten)
            check_unused_alike(self._loss_world.all_gather_object(names))
            # Parameters that all ranks use now may be skipped by some later. With several optimizers, each would get a
            # gradient of zero from the losses of the others.
            if not names and len(self._optimizers) == 1:
                reduce_unused(sharded.values())
        if len(optimizers) > 1 and self._world.is_main:
            # All step after the backward pass, unless the user's step steps them one by one.
            report_shared(self._models, optimizers)


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


def unused_names(models: Mapping[str, nn.Module], unused: set[torch.Tensor]) -> list[str]:
    """Return the names of the models' parameters that are in `unused`."""
    return [name for name, parameter in named_parameters(models) if parameter in unused]


def check_unused_alike(names_by_rank: Sequence[Sequence[str]]) -> None:
    """Check that the same parameters of sharded models got no gradient on all ranks.

    Raises:
        StepError: they differ, and FSDP2 has added gradients of different parameters.
    """
    if differing := sorted(set().union(*names_by_rank) - set(names_by_rank[0]).intersection(*names_by_rank[1:])):
        raise StepError(
            f"{_list(differing)} got no gradient on some ranks in the first update, and a sharded model needs them of "
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
    if names := differing_on_ranks(models, replicated, world):
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


def differing_on_ranks(models: Mapping[str, nn.Module], replicated: Container[nn.Parameter], world: World) -> list[str]:
    """Return the names of replicated parameters whose norms or sums differ. Every rank must call this."""
    if world.size == 1:
        return []
    named = {name: parameter.detach() for name, parameter in named_parameters(models) if parameter in replicated}
    # The names themselves, which may be many, are sent only if they differ.
    if len(set(world.all_gather_object(zlib.crc32("\0".join(named).encode())))) > 1:
        names_of_ranks = world.all_gather_object(list(named))
        on_all = set.intersection(*map(set, names_of_ranks))
        return list(dict.fromkeys(name for names in names_of_ranks for name in names if name not in on_all))
    return _spread(named, world, norm_share=1e-4)


def _spread(named: Mapping[str, torch.Tensor], world: World, *, norm_share: float, floor: float = 0.0) -> list[str]:
    """Return the names of tensors whose norms or sums differ between ranks; all ranks have the same names."""
    if not named:
        return []
    values = list(named.values())
    norms = torch.stack([norm.float() for norm in foreach_norm(values)])
    # Numbers drawn from one distribution have almost equal norms where there are many, and other sums.
    sums = torch.stack([(each.real if each.is_complex() else each).sum(dtype=torch.float32) for each in values])
    of_ranks = world.all_gather(torch.cat([norms, sums])).view(world.size, 2, -1)
    norm_spread, sum_spread = of_ranks.amax(0) - of_ranks.amin(0)
    largest = of_ranks[:, 0].amax(0)
    largest = largest.clamp(min=floor * largest.max().item())
    differ = ((norm_spread > norm_share * largest) | (sum_spread > 1e-2 * largest)).tolist()
    return [name for name, differs in zip(named, differ, strict=True) if differs]


def check_undivided_gradients(models: Mapping[str, nn.Module], optimizers: Iterable[Optimizer], world: World) -> None:
    """Check that parameters that the plan does not divide have equal gradients on the ranks that divide layers.

    Such a parameter gets a part of its gradient on each rank if it is applied to the ranks' parts of an activation, as
    the norm of queries and keys is. Every rank must call this; waits for the device.

    Args:
        models: by name.
        optimizers: their parameters are checked.
        world: the ranks that divide layers.

    Raises:
        StepError: gradients differ.
    """
    held = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    undivided = {name: p for name, p in named_parameters(models) if p in held and not _is_on_tensor_mesh(p)}
    gradients = {
        name: to_local(torch.zeros_like(p) if p.grad is None else dense_values(p.grad)).detach()
        for name, p in undivided.items()
    }
    # The floor: what is zero but for rounding may differ.
    if names := _spread(gradients, world, norm_share=1e-3, floor=1e-6):
        raise StepError(
            f"the gradients of {_list(names)} differ between the ranks of parallel.tp in the first update: each rank "
            "applies these undivided parameters to its part of the output of a divided layer, so that its gradient is "
            "incomplete. Add the module to configure_tensor_parallel(), such as "
            f'"{names[0].rpartition(".")[0]}": SequenceParallel(sequence_dim=1, use_local_output=True) for a norm '
            "whose input is divided along dimension 1, such as heads; or give the layer before it "
            "output_layouts=Replicate()"
        )


def _is_on_tensor_mesh(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, DTensor) and "tp" in (parameter.device_mesh.mesh_dim_names or ())


def report_shared(models: Mapping[str, nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Warn about parameters that several optimizers update in the same step."""
    held = Counter(parameter for each in optimizers for group in each.param_groups for parameter in group["params"])
    if names := [name for name, parameter in named_parameters(models) if held[parameter] > 1]:
        warnings.warn(
            f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''} is in several optimizers, and each "
            "updates it: give it to one, or call self.backward(loss) and self.step(optimizer) in training_step",
            stacklevel=2,
        )


def _trained_modules(models: Mapping[str, nn.Module], optimizers: Sequence[Optimizer]) -> set[nn.Module]:
    """Return the modules with a parameter, or a part with one, that an optimizer has; a teacher has none."""
    held = {each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    trained = {each for each in held if each.requires_grad}
    modules = [module for model in models.values() for module in model.modules()]
    return {module for module in modules if not trained.isdisjoint(module.parameters())}


def _warn_of_evaluation_mode(
    models: Mapping[str, nn.Module], were_training: Mapping[str, bool], trained: set[nn.Module]
) -> None:
    if left := [name for name, model in models.items() if were_training[name] and not model.training]:
        warnings.warn(
            f"training_step left {', '.join(left)} in evaluation mode, without dropout and updates of running means: "
            f"call self.{left[0]}.train() at its end, unless that is what you want",
            stacklevel=2,
        )
    for name, model in models.items():
        if (path := _trains_in_evaluation_mode(unwrap(model), trained)) is not None and name not in left:
            path = f"{name}.{path}".rstrip(".")
            warnings.warn(
                f"{path} is trained in evaluation mode, without dropout and updates of running means; from_pretrained "
                "returns models so. Call its train() in configure_models(), unless that is what you want",
                stacklevel=2,
            )


_LAYERS_WITH_MODES = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.BatchNorm1d, nn.BatchNorm2d,
    nn.BatchNorm3d, nn.SyncBatchNorm,
)  # fmt: skip


def _trains_in_evaluation_mode(model: nn.Module, trained: set[nn.Module]) -> str | None:
    """Return the path of the outermost part in evaluation mode that is trained and has layers that then differ."""
    for path, module in model.named_modules():
        if module.training or module not in trained or isinstance(module, _LAYERS_WITH_MODES):
            continue
        if any(isinstance(each, _LAYERS_WITH_MODES) and getattr(each, "p", 1.0) > 0 for each in module.modules()):
            return str(path)
    return None


def _gradient_versions(optimizers: Sequence[Optimizer]) -> dict[nn.Parameter, int | None]:
    """Return the version of each parameter's gradient, which changes when it is modified; None without a gradient."""
    return {
        p: None if p.grad is None else version_of(p.grad)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    }


def _list(names: Sequence[str]) -> str:
    return f"{', '.join(names[:_MOST_NAMES])}{f' and {len(names) - _MOST_NAMES} more' if names[_MOST_NAMES:] else ''}"
