"""Models and optimizers as parts of a checkpoint, by the parameter names of the unwrapped modules.

The names do not depend on the parallel strategy, so a run saved under DDP can resume under FSDP2, and the reverse.

`torch.distributed.checkpoint.state_dict` is not used: to initialise an optimizer's state it takes a step, which
permanently changes Adam's bias correction; and it rejects SGD without momentum and parameters that never had a
gradient. `Optimizer.load_state_dict` alone would cast float32 moments to a bfloat16 parameter's dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..distributed.dtensor import strip_wrappers, to_local
from ..errors import CheckpointError, ConfigError
from .format.plain_values import PLAIN_TENSORS, iter_tensors, values_of_rows

# Name components added by wrappers. DDP, which wraps the whole model, is removed as a module instead.
_CHECKPOINTED, _COMPILED = "_checkpoint_wrapped_module", "_orig_mod"


class NamedModels(dict[str, nn.Module]):
    """Models by the names under which they are saved, with their state dicts and names computed once and shared."""

    @functools.cached_property
    def state_by_model(self) -> dict[str, dict[str, Any]]:
        """Return the live `unwrapped_state_dict` of each model."""
        return {name: unwrapped_state_dict(model, keep_vars=True) for name, model in self.items()}

    def sharded(self) -> dict[str, torch.Tensor]:
        """Return the live sharded tensors, by their names in a checkpoint."""
        return {
            f"models/{model}/{key}": value
            for model, state in self.state_by_model.items()
            for key, value in state.items()
            if isinstance(value, DTensor)
        }

    @functools.cached_property
    def names(self) -> dict[int, str]:
        """Return the name of each tensor of the models by its id, the first name of a tied weight."""
        named = (
            (id(value), f"{model}.{key}") for model, each in self.state_by_model.items() for key, value in each.items()
        )
        return dict(reversed(list(named)))

    def clear_cache(self) -> None:
        """Discard what was computed, because the models' tensors may have changed."""
        self.__dict__.pop("state_by_model", None)
        self.__dict__.pop("names", None)


class ModelState:
    """The weights and buffers of possibly wrapped models.

    Args:
        models: models by the names under which they are saved.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._models = models if isinstance(models, NamedModels) else NamedModels(models)
        self._targets: dict[tuple[str, str], torch.Tensor] | None = None

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return each model's live state by the names of the unwrapped model; sharded tensors stay sharded."""
        return self._models.state_by_model

    def load_target(self, path: tuple[str, ...], size: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the live tensor, so that a checkpoint is read straight into it."""
        if self._targets is None:
            self._targets = {
                (name, key): value for name, model in self._models.items() for key, value in named_state_tensors(model)
            }
        live = self._targets.get((path[0], "/".join(path[1:])))
        return live if live is not None and live.shape == size else None

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Load all weights and buffers.

        Raises:
            CheckpointError: models, keys or shapes differ from the live ones.
        """
        self._targets = None
        self._models.clear_cache()
        _compare("models", state, self._models)
        for name, model in self._models.items():
            module = strip_wrappers(model)
            keys = {_unwrapped_name(key): key for key in module.state_dict()}
            _compare(f"keys of {name!r}", state[name], keys)
            # They are the live parameters if a checkpoint was read into them; torch does not copy these to themselves.
            with torch.no_grad():
                module.load_state_dict({keys[key]: value for key, value in state[name].items()})
        self._models.clear_cache()


class ModelModes:
    """Which parameters train, and which modules are in training mode, where a run has changed it since its setup.

    As a part of a checkpoint, so that a run that unfreezes a layer at some step, or puts a norm in evaluation mode,
    resumes with it.

    Args:
        models: models by the names under which they are saved, as the setup has left them.
        before_evaluation: returns the mode of each module before the evaluation in progress; empty if there is none.
    """

    def __init__(
        self, models: Mapping[str, nn.Module], before_evaluation: Callable[[], Mapping[nn.Module, bool]]
    ) -> None:
        self._before_evaluation = before_evaluation
        self._parameters = [
            (f"{name}.{key}", value, value.requires_grad)
            for name, model in models.items()
            for key, value in named_state_tensors(model)
            if isinstance(value, nn.Parameter)
        ]
        self._modules = [
            (f"{name}.{_unwrapped_name(path)}".rstrip("."), module, module.training)
            for name, model in models.items()
            for path, module in strip_wrappers(model).named_modules()
        ]

    def state_dict(self) -> dict[str, dict[str, bool]]:
        """Return what has changed, by name."""
        before = self._before_evaluation()
        return {
            "trains": {name: each.requires_grad for name, each, was in self._parameters if each.requires_grad != was},
            "training": {
                name: mode for name, each, was in self._modules if (mode := before.get(each, each.training)) != was
            },
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, bool]], /) -> None:
        """Set what had changed, and everything else as the setup has left it."""
        for name, parameter, was in self._parameters:
            parameter.requires_grad_(state["trains"].get(name, was))
        for name, module, was in self._modules:
            module.training = state["training"].get(name, was)


class OptimizerState:
    """The state and settings of one optimizer.

    Args:
        models: models whose parameters the optimizer may hold.
        name: name of the optimizer, for messages.
        optimizer: an optimizer over parameters of one or several models.

    Raises:
        ConfigError: the optimizer holds a parameter that belongs to no model, so no checkpoint would contain it.
    """

    def __init__(self, models: Mapping[str, nn.Module], name: str, optimizer: torch.optim.Optimizer) -> None:
        self._models = models if isinstance(models, NamedModels) else NamedModels(models)
        self._name = name
        self._optimizer = optimizer
        self._targets: dict[str, nn.Parameter] | None = None
        self._parameter_names()

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state dict, with parameter names in place of indices."""
        names = self._parameter_names()
        state = self._optimizer.state_dict()
        values = {names[key] if isinstance(key, int) else key: value for key, value in state["state"].items()}
        strides = _unusual_strides(values)
        return {
            **state,
            "class": type(self._optimizer).__name__,
            "state": values,
            **({"strides": strides} if strides else {}),
            "param_groups": [
                {**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]
            ],
        }

    def load_target(self, path: tuple[str, ...], size: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
        """Return an empty tensor, sharded and placed like the parameter to which the state belongs."""
        if self._targets is None:
            self._targets = self._parameters_by_name()
        parameter = self._targets.get(path[1]) if path[0] == "state" else None
        if parameter is None or not size:  # step counts stay on the CPU
            return None
        if isinstance(parameter, DTensor) and parameter.shape == size:
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        return torch.empty(size, dtype=dtype, device=parameter.device)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the settings, and the state in its saved dtypes.

        Raises:
            CheckpointError: the class or the parameter groups differ from the saved ones.
        """
        self._targets = None
        saved_class, own_class = state.get("class"), type(self._optimizer).__name__
        if saved_class != own_class:
            raise CheckpointError(
                f"optimizer {self._name!r} is an {own_class}, but the checkpoint has the state of an {saved_class}: "
                "set that one in configure_optimizers(), or remove 'optimizers' from restore= to start with a new state"
            )
        parameters = self._parameters_by_name()
        numbers = {name: number for number, name in enumerate(parameters)}
        saved_groups, live_groups = state["param_groups"], self._optimizer.param_groups
        if len(saved_groups) != len(live_groups):
            raise CheckpointError(
                f"optimizer {self._name!r} has {len(live_groups)} parameter groups, but the checkpoint has "
                f"{len(saved_groups)}: create all of them in configure_optimizers(), also one that is used only later, "
                "with frozen parameters"
            )
        groups, names = [], iter(parameters)
        for index, (saved, live) in enumerate(zip(saved_groups, live_groups, strict=True)):
            held = [next(names) for _ in live["params"]]
            _compare(f"parameters of group {index} of optimizer {self._name!r}", saved["params"], held)
            groups.append({**saved, "params": [numbers[name] for name in held]})
        strides = state.get("strides", {})
        values = _with_strides(state["state"], strides) if strides else state["state"]
        state = {**{key: value for key, value in state.items() if key != "strides"}, "state": values}
        by_number = {numbers.get(name, name): value for name, value in values.items()}
        self._optimizer.load_state_dict({**state, "state": by_number, "param_groups": groups})
        for name, values in state["state"].items():
            if name in parameters:
                _restore_dtypes(self._optimizer.state[parameters[name]], values)

    def _parameter_names(self) -> list[str]:
        """Return the parameter names in the order of the optimizer's indices."""
        known = self._models.names
        held = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        names = [known.get(id(parameter), "") for parameter in held]
        if not all(names):
            unknown = [index for index, name in enumerate(names) if not name]
            raise ConfigError(
                f"optimizer {self._name!r} holds {len(unknown)} parameters that belong to none of the models "
                f"({', '.join(self._models) or 'there is none'}), the first at index {unknown[0]}, of shape "
                f"{tuple(held[unknown[0]].shape)}: put each into a module that is an attribute of the trainer, "
                "such as self.weights = nn.ParameterList([parameter]), "
                "and create optimizers in configure_optimizers(), or by optimizer= of a Session: a model that creates "
                "one itself gives it parameters that sharding replaces"
            )
        return names

    def _parameters_by_name(self) -> dict[str, nn.Parameter]:
        held = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        return dict(zip(self._parameter_names(), held, strict=True))


def _unusual_strides(state: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the strides of the tensors whose dimensions lie in memory in another order, by path.

    A product with such a matrix, as of eigenvectors in Shampoo and SOAP, is rounded otherwise than with a copy in the
    usual order.
    """
    values = values_of_rows(state)
    if values and set(map(type, values)) <= PLAIN_TENSORS and all(map(torch.Tensor.is_contiguous, values)):
        return {}  # as of most optimizers; found in a tenth of the time
    return {
        "/".join(path): list(torch.empty_like(tensor, device="meta").stride())
        for path, tensor in iter_tensors(state)
        if not isinstance(tensor, DTensor) and not tensor.is_contiguous()
    }


def _with_strides(value: Any, strides: Mapping[str, list[int]], path: tuple[str, ...] = ()) -> Any:
    """Return nested state whose tensors have the given strides, by path."""
    if isinstance(value, torch.Tensor):
        wanted = strides.get("/".join(path))
        if wanted is None or isinstance(value, DTensor):
            return value
        return torch.empty_strided(value.shape, wanted, dtype=value.dtype, device=value.device).copy_(value)
    if type(value) is dict:
        return {key: _with_strides(each, strides, (*path, str(key))) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_strides(each, strides, (*path, str(index))) for index, each in enumerate(value))
    return value


def unwrapped_state_dict(model: nn.Module, *, keep_vars: bool = False) -> dict[str, Any]:
    """Return a model's state dict with the names of the unwrapped model; sharded tensors stay sharded."""
    return {_unwrapped_name(key): value for key, value in strip_wrappers(model).state_dict(keep_vars=keep_vars).items()}


def tensors_changed_by_step(
    models: NamedModels, optimizers: Mapping[str, torch.optim.Optimizer], others: Iterable[torch.Tensor] = ()
) -> tuple[Callable[[torch.Tensor], bool], Callable[[torch.Tensor], bool]]:
    """Return two predicates: for tensors that do not change until the next optimizer step, and for replicated ones.

    The former are the parameters of optimizers, their state and those given as `others`. A parameter that no optimizer
    holds is not among them: a step may average it by itself at any time, also by `parameter.data`, which leaves no
    trace. Like them, it is equal on all ranks, unless it is sharded.
    """
    values: list[Any] = [
        parameter
        for optimizer in optimizers.values()
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    for optimizer in optimizers.values():
        of_state = values_of_rows(optimizer.state)
        if of_state is None:
            of_state = [
                value
                for state in optimizer.state.values()
                for value in (state.values() if isinstance(state, Mapping) else (state,))
            ]
        values += of_state
    values += others
    states = list(models.state_by_model.values())
    parameters = (value for state in states for value in state.values() if isinstance(value, nn.Parameter))
    is_replicated = functools.cache(lambda: _in_memory_of([*values, *parameters]))  # asked for with several ranks only
    return _in_memory_of(values), lambda tensor: is_replicated()(tensor)


def _in_memory_of(values: Sequence[Any]) -> Callable[[torch.Tensor], bool]:
    """Return a predicate for tensors that are among these values, or share the memory of one of them.

    Most are among them. That takes a fifth of the time to find out, so addresses are computed only for the others.
    """
    ids = set(map(id, values))
    addresses = functools.cache(lambda: {address(each) for each in values if isinstance(each, torch.Tensor)})

    def address(tensor: torch.Tensor) -> int:
        return (tensor if type(tensor) in PLAIN_TENSORS else to_local(tensor)).data_ptr()

    return lambda tensor: id(tensor) in ids or address(tensor) in addresses()


def _unwrapped_name(key: str) -> str:
    if _CHECKPOINTED not in key and _COMPILED not in key:
        return key
    return ".".join(each for each in key.split(".") if each not in (_CHECKPOINTED, _COMPILED))


def named_state_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the live parameters and buffers with the names of the unwrapped model; sharded tensors stay sharded."""
    # Not named_parameters(): if a sharded model is currently gathered, it returns the gathered parameters.
    state = unwrapped_state_dict(model, keep_vars=True)
    return [(key, value) for key, value in state.items() if isinstance(value, torch.Tensor)]


def _compare(what: str, saved: Iterable[str], live: Iterable[str]) -> None:
    missing, unexpected = sorted(set(live) - set(saved)), sorted(set(saved) - set(live))
    if missing or unexpected:
        raise CheckpointError(
            f"the {what} differ: not in the checkpoint: {_shorten(missing)}; "
            f"only in the checkpoint: {_shorten(unexpected)}{_advice([*missing, *unexpected])}"
        )


def _advice(names: list[str]) -> str:
    """Return what to do about names of weights that torch's tools change during a run; "" for other names."""
    if any(name.endswith(("_orig", "_mask")) for name in names):
        return (
            ". torch.nn.utils.prune changes the names of weights, and the run has pruned since it began: let "
            "configure_models() give the model these names, by prune.identity(module, name), and prune it further "
            "during the run"
        )
    if any("parametrizations." in name or name.endswith(("weight_g", "weight_v")) for name in names):
        return (
            ". A parametrization changes the names of weights: register it in configure_models(), and not during the "
            "run"
        )
    return ""


def _shorten(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") if names else "none"


def _restore_dtypes(live: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for key, value in saved.items():
        if isinstance(value, torch.Tensor) and live[key].dtype != value.dtype:
            live[key] = value.to(live[key].device)
