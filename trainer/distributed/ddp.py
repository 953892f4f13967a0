"""DDP that can be used like the module inside it, and that notices forward passes around it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..errors import StepError
from ..private_torch import has_gradient_hooks

COPIED = (
    "is copied after configure_models(), so that the copy would be in no checkpoint: make it there, as "
    "self.target = copy.deepcopy(self.model), or in model= of a Session, which may return a dict of models, and change "
    "its weights in place"
)
_ADVICE = {
    "Expected to have finished reduction in the prior iteration": (
        "the loss before this forward pass reached only a part of the model, and DDP waits for the gradients of all: "
        "set parallel.find_unused_parameters=True"
    ),
    "Encountered gradient which is undefined": (
        "several losses came from one forward pass, and DDP reduces gradients once: remove "
        "parallel.find_unused_parameters, or let the step call a method of the model in place of the model, and "
        "Headway reduces the gradients"
    ),
    "Cannot access data pointer of Tensor that doesn't have storage": (
        "where torch.func (vmap, grad, functional_call) called a model that DDP has wrapped: give it "
        "self.unwrap(self.model) and the named_parameters() of that, or put the call into a method of the model"
    ),
    "Expected 'module', got": (
        "torch.distributed.checkpoint.state_dict expects the names of a model that DDP has wrapped: give it "
        "self.unwrap(self.model), which is right under every strategy"
    ),
}
"""What to do about torch's errors, by what they say."""

_TRAINS = operator.attrgetter("requires_grad")
_OPERATORS = ("__getitem__", "__len__", "__iter__", "__contains__")


class ReplicatedModule(DistributedDataParallel):
    """A replicated model with the attributes, methods and names of the user's module.

    Parameters, modules and the state dict have no prefix "module.", so that code which selects them by name or child
    finds the same ones on any number of ranks.

    DDP averages the gradients of a backward pass only if the forward pass before it went through DDP. A forward pass
    through a part of the model, or through a method that calls the module inside, does not: its gradients would stay
    different on every rank, without an error. `reduces_itself` tells whether DDP reduces the next backward pass. Nor
    does it ever reduce gradients of parameters that were frozen when the module was wrapped: `reduced` has the others.
    And it waits for the gradients of all parameters: while one of them is frozen it reduces nothing, and losses that
    reach a part of them each need `leave_gradients`.

    Args:
        module: the user's module, initialized.
        options: as for `DistributedDataParallel`.
    """

    def __new__(cls, module: nn.Module, **options: Any) -> ReplicatedModule:
        """Create a module that supports the operators of the user's, as in `self.model["encoder"]`."""
        # Python looks these up in the class.
        operators = {name: _of_module(name) for name in _OPERATORS if hasattr(type(module), name)}
        return super().__new__(type(cls.__name__, (cls,), operators) if operators else cls)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse a copy, as FSDP2 does."""
        raise StepError(f"{type(self.module).__name__} {COPIED}")

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.reduces_itself = False
        self.leaves_gradients = False
        self.reduced = frozenset(parameter for parameter in module.parameters() if parameter.requires_grad)
        self._is_ready = True

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass, and prepare to reduce gradients."""
        if not torch.is_grad_enabled():
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        # Without the reduction of gradients, DDP would also leave out the broadcast of buffers.
        self.require_forward_param_sync |= self.leaves_gradients
        syncs = self.require_backward_grad_sync
        self.reduces_itself = syncs and (self.find_unused_parameters or all(map(_TRAINS, self.reduced)))
        self.require_backward_grad_sync = self.reduces_itself
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            self.require_backward_grad_sync = syncs
            self.require_forward_param_sync |= syncs

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Yield the parameters by their names in the module inside."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        """Yield the buffers by their names in the module inside."""
        return self.module.named_buffers(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        """Yield the module inside, and those in it, by their names in it."""
        return self.module.named_modules(*args, **kwargs)

    def named_children(self) -> Any:
        """Yield the children of the module inside."""
        return self.module.named_children()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the module inside."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the state of the module inside."""
        return self.module.load_state_dict(*args, **kwargs)

    def train(self, mode: bool = True) -> ReplicatedModule:
        """Set the mode of the module inside, too: it is not among the children."""
        self.training = mode
        self.module.train(mode)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> ReplicatedModule:
        """Apply a function to the module inside, and those in it."""
        self.module.apply(fn)
        return self

    def _apply(self, *args: Any, **kwargs: Any) -> ReplicatedModule:
        # What to(), cuda() and half() call.
        self.module._apply(*args, **kwargs)
        return self

    def leave_gradients(self) -> None:
        """Never reduce gradients, which the caller does before an optimizer steps."""
        self.leaves_gradients, self.require_backward_grad_sync = True, False

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


def add_ddp_advice(error: BaseException) -> None:
    """Add a note to errors of torch about DDP that do not say what to change."""
    for said, advice in _ADVICE.items():
        if isinstance(error, (RuntimeError, AssertionError)) and said in str(error):
            error.add_note(advice)


class _Sum(nn.Module):
    """A forward pass whose backward pass reaches the parameters of a module in the opposite order."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        embeddings = [each for each in module.modules() if isinstance(each, (nn.Embedding, nn.EmbeddingBag))]
        self._sparse = {each.weight for each in embeddings if each.sparse}

    def forward(self) -> torch.Tensor:
        total = torch.zeros((), device=self._trained[0].device)
        for parameter in self._trained:
            if parameter in self._sparse:
                row = torch.zeros(1, dtype=torch.long, device=parameter.device)
                total = total + nn.functional.embedding(row, parameter, sparse=True).sum()
            else:
                total = total + (torch.view_as_real(parameter) if parameter.is_complex() else parameter).sum()
        return total


def rebuild_buckets(model: ReplicatedModule) -> None:
    """Let DDP rebuild the buckets in which it reduces gradients before the first update instead of after it.

    DDP rebuilds them after the first backward pass of a process, in the order in which gradients came. The sums of
    three or more ranks depend on the order by rounding, so the first update after a restart would differ from that of a
    run that was not interrupted. A backward pass through the sum of the parameters settles it for both.

    Every rank must call this. It leaves no gradients. It does nothing where DDP never rebuilds its buckets
    (`find_unused_parameters`), or where a user's hook would see the gradients.
    """
    trained = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    if model.find_unused_parameters or any(has_gradient_hooks(each) for each in trained):
        return
    module = model.module
    model._modules["module"] = _Sum(module)  # whose call runs none of the user's hooks
    model.require_forward_param_sync = False  # until the end of this pass: its buffers are equal already
    try:
        with torch.enable_grad():
            DistributedDataParallel.forward(model).backward()  # type: ignore[no-untyped-call]
    finally:
        model._modules["module"] = module
    for parameter in trained:
        parameter.grad = None


def _of_module(name: str) -> Callable[..., Any]:
    def call(self: ReplicatedModule, *args: Any) -> Any:
        return getattr(self.module, name)(*args)

    return call


def frozen_when_wrapped(models: Iterable[nn.Module]) -> frozenset[torch.Tensor]:
    """Return the parameters of replicated models whose gradients DDP never reduces: they were frozen then."""
    unknown: set[torch.Tensor] = set()
    for model in models:
        if isinstance(model, ReplicatedModule):
            unknown |= set(model.parameters()) - model.reduced
        elif not any(each.requires_grad for each in model.parameters()):
            unknown |= {each for each in model.parameters() if not isinstance(each, DTensor)}
    return frozenset(unknown)
