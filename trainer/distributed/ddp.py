"""DDP that can be used like the module inside it, and that notices forward passes around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_OPERATORS = ("__getitem__", "__len__", "__iter__", "__contains__")


class ReplicatedModule(DistributedDataParallel):
    """A replicated model with the attributes and methods of the user's module.

    DDP averages the gradients of a backward pass only if the forward pass before it went through DDP. A forward pass
    through a part of the model, or through a method that calls the module inside, does not: its gradients would stay
    different on every rank, without an error. `reduces_itself` tells whether DDP reduces the next backward pass. Nor
    does it ever reduce gradients of parameters that were frozen when the module was wrapped: `reduced` has the others.

    Args:
        module: the user's module, initialized.
        options: as for `DistributedDataParallel`.
    """

    def __new__(cls, module: nn.Module, **options: Any) -> ReplicatedModule:
        """Create a module that supports the operators of the user's, as in `self.model["encoder"]`."""
        # Python looks these up in the class.
        operators = {name: _of_module(name) for name in _OPERATORS if hasattr(type(module), name)}
        return super().__new__(type(cls.__name__, (cls,), operators) if operators else cls)

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.reduces_itself = False
        self.reduced = frozenset(parameter for parameter in module.parameters() if parameter.requires_grad)
        self._is_ready = True

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass, and prepare to reduce gradients."""
        if torch.is_grad_enabled():
            self.reduces_itself = self.require_backward_grad_sync
        return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_is_ready" in self.__dict__ and name not in self.__dict__ and not hasattr(type(self), name):
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)


def _of_module(name: str) -> Callable[..., Any]:
    def call(self: ReplicatedModule, *args: Any) -> Any:
        return getattr(self.module, name)(*args)

    return call
