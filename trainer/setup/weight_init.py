"""Initialization of models, equal for every number of ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import TorchDispatchMode

from ..distributed.dtensor import to_local
from ..distributed.parallelize import named_tensors
from ..errors import ConfigError
from ..private_torch import returns_view, version_of, written_arguments

aten = torch.ops.aten
_DRAW_PLAIN = (
    "draw into a plain tensor of the weight's shape, and copy this rank's part of it, by "
    "torch.distributed.tensor.distribute_tensor(..., src_data_rank=None)"
)


def initialize_weights(
    models: Mapping[str, nn.Module],
    init_weights: Callable[[], None],
    lost_values: Mapping[str, str],
    versions_after_reset: Mapping[str, int | None],
) -> None:
    """Call `init_weights`, with the same random numbers for every number of ranks, and check that it sets everything.

    Args:
        models: on the device, without values.
        init_weights: of the user, or the default.
        lost_values: see `RunContext`.
        versions_after_reset: gets the versions of tensors if `init_weights` calls the default.

    Raises:
        ConfigError: a parameter or buffer got no value, or that of `reset_parameters` instead of another.
    """
    tensors = dict(named_tensors(models))
    for tensor in tensors.values():
        _fill_nan(tensor)
    versions = {name: version_of(tensor) for name, tensor in tensors.items()}
    try:
        with torch.no_grad(), shard_invariant_random():
            init_weights()
    except RuntimeError as error:
        if any(isinstance(tensor, DTensor) for tensor in tensors.values()):
            error.add_note(
                "init_weights() and reset_parameters() see shards of the weights (DTensors), which some functions do "
                f"not know, such as torch.nn.init.orthogonal_: {_DRAW_PLAIN}. Or let configure_models() give the "
                "model these values, without init_weights()"
            )
        raise
    after = dict(named_tensors(models))
    _check_set(
        name
        for name, tensor in after.items()
        if name in tensors
        and tensor is tensors[name]
        and _is_unset(tensor, untouched=version_of(tensor) == versions[name] is not None)
    )
    for name, version in versions_of(models).items() if versions_after_reset else ():
        if name in lost_values and version == versions_after_reset.get(name) is not None:
            raise ConfigError(
                f"init_weights() calls super().init_weights(), by which {name} gets the value of reset_parameters() "
                f"in place of that of {lost_values[name]}: set it in init_weights(), too, or set all values in "
                "configure_models(), without init_weights()"
            )


def versions_of(models: Mapping[str, nn.Module]) -> dict[str, int | None]:
    """Return the number of changes of each tensor in place."""
    with torch.no_grad():
        return {name: version_of(to_local(tensor)) for name, tensor in named_tensors(models)}


def shard_invariant_random() -> AbstractContextManager[object]:
    """Return a context in which random numbers for sharded tensors are those of whole ones."""
    return _ShardInvariantRandom()


class UnsetTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills tensors that are created without values, as by `torch.empty`, with NaN, so that unset values are found."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._created: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in WITHOUT_VALUES and not result.is_meta:
            _fill_nan(result)
            self._created.add(result.untyped_storage())
        return result

    def initialize(self, models: Mapping[str, nn.Module]) -> None:
        """Call `reset_parameters` of modules whose tensors have no values yet.

        Raises:
            ConfigError: a parameter or buffer got no value.
        """
        with torch.no_grad():
            for model in models.values():
                # From the inside out: a module may initialize the parameters of those in it.
                for module in reversed(list(model.modules())):
                    reset = getattr(module, "reset_parameters", None)
                    if callable(reset) and any(self._has(each) for each in (*module.parameters(), *module.buffers())):
                        reset()
        _check_set(name for name, tensor in named_tensors(models) if self._has(tensor))

    def _has(self, tensor: torch.Tensor) -> bool:
        if (
            isinstance(tensor, (DTensor, UninitializedParameter, UninitializedBuffer))
            or tensor.untyped_storage() not in self._created
        ):
            return False
        return _is_unset(tensor, untouched=False)


WITHOUT_VALUES = (
    *(aten.empty, aten.empty_like, aten.empty_permuted, aten.empty_strided),
    *(aten.new_empty, aten.new_empty_strided),
)
"""Operators that return tensors without values."""


def _check_set(unset: Iterable[str]) -> None:
    if names := list(unset):
        raise ConfigError(
            f"{', '.join(names[:8])}{' and more' if len(names) > 8 else ''} got no value: define "
            "`reset_parameters()` in the module that owns each, or override `init_weights()` in the trainer"
        )


def reset_parameters(model: nn.Module) -> None:
    """Call `reset_parameters` of every module that has one, in the order of `modules()`."""
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()


class _ShardInvariantRandom(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draws random numbers for a sharded tensor as for the unsharded one, and keeps this rank's part.

    Without it, every rank on a CPU would fill its shard from the same generator, so that the shards of a weight were
    equal; and initial weights would depend on the number of ranks. Needs memory for one unsharded tensor at a time.

    Also writes to a sharded tensor what is written to a view of it, as in `weight[padding_idx].fill_(0)`, because the
    view of a DTensor may be a copy.
    """

    _FILL = (
        *(aten.uniform_, aten.normal_, aten.exponential_, aten.log_normal_, aten.cauchy_, aten.random_),
        *(aten.geometric_, aten.rand_like, aten.randn_like, aten.randint_like),
    )
    _READ = (aten.bernoulli, aten.bernoulli_, aten.normal, aten.poisson)
    """Functions that read probabilities or means from a tensor, of which every rank has a part."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # By the id of a view that is a copy: the tensor of which it is one, and the function that makes it. As long as
        # the view exists.
        self._copies: dict[int, tuple[DTensor, Callable[[torch.Tensor], Any]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for each in args:
            self._refresh(each)
        result = self._call(func, args, kwargs)
        for position, name in written_arguments(func):
            self._write_back(args[position] if position < len(args) else kwargs.get(name))
        if args and isinstance(args[0], DTensor) and returns_view(func):
            self._remember_copies(func, args, kwargs, result)
        return result

    def _remember_copies(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        for index, view in enumerate(result if isinstance(result, (list, tuple)) else [result]):

            def make(whole: torch.Tensor, index: int = index) -> Any:
                made = func(whole, *args[1:], **kwargs)
                return made[index] if isinstance(made, (list, tuple)) else made

            base = args[0]
            # Where a tensor stays divided, its view is one of each shard. All ranks decide alike.
            placements = zip(base.placements, view.placements, strict=True) if isinstance(view, DTensor) else ()
            is_copy = any(before.is_shard() and not after.is_shard() for before, after in placements)
            if view is not base and (is_copy or id(base) in self._copies):
                self._copies[id(view)] = base, make
                weakref.finalize(view, self._copies.pop, id(view))

    def _refresh(self, view: Any) -> None:
        """Read the values of a view that is a copy again."""
        if id(view) in self._copies:
            base, make = self._copies[id(view)]
            self._refresh(base)
            values = make(base.full_tensor()).contiguous()
            part = distribute_tensor(values, view.device_mesh, view.placements, src_data_rank=None)
            to_local(view).copy_(part.to_local())

    def _write_back(self, view: Any) -> None:
        """Write the values of a view that is a copy to the tensor of which it is one."""
        while id(view) in self._copies:
            base, make = self._copies[id(view)]
            whole = base.full_tensor()
            make(whole).copy_(view.full_tensor())
            part = distribute_tensor(whole, base.device_mesh, base.placements, src_data_rank=None)
            to_local(base).copy_(part.to_local())
            view = base

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        # `weight[0, 1:3] = 7.0`, which DTensor does not know.
        if func is aten.fill_.Tensor and isinstance(args[0], DTensor) and not isinstance(args[1], DTensor):
            return aten.fill_.Scalar(args[0], args[1].item())
        target = next((each for each in (*kwargs.values(), *args) if isinstance(each, DTensor)), None)
        if target is None or torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        reads = func.overloadpacket in self._READ
        if not reads and func.overloadpacket not in self._FILL:
            raise ConfigError(
                f"init_weights, reset_parameters or configure_optimizers calls {func} on a sharded weight, which would "
                f"draw different numbers for every number of ranks: {_DRAW_PLAIN}"
            )
        whole_args = [_unsharded(each, reads) for each in args]
        full = func(*whole_args, **{name: _unsharded(each, reads) for name, each in kwargs.items()})
        # src_data_rank=None: every rank has drawn the same numbers, so none are sent.
        part = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)
        if not written_arguments(func):
            return part
        target.to_local().copy_(part.to_local())
        return target


def _unsharded(value: Any, has_values: bool) -> Any:
    """Return a plain unsharded tensor for a sharded one, with its values if `has_values`."""
    if not isinstance(value, DTensor):
        return value
    return value.full_tensor() if has_values else torch.empty(value.shape, dtype=value.dtype, device=value.device)


def _fill_nan(tensor: torch.Tensor) -> None:
    """Fill a tensor with NaN, so that unset values are found."""
    part = to_local(tensor.detach())
    if part.is_floating_point() or part.is_complex():
        part.fill_(float("nan"))


def _is_unset(tensor: torch.Tensor, *, untouched: bool) -> bool:
    part = to_local(tensor.detach())
    if part.is_floating_point() or part.is_complex():
        return bool(part.isnan().any())
    # Integers and booleans have no NaN; they are buffers, which are never sharded.
    return untouched
