"""Checks that Headway trains what the user means, before the first update and during the run."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..distributed.dtensor import unwrap
from ..distributed.fsdp import sharded_roots
from ..errors import ConfigError, StepError
from ..loop.context import RunContext
from ..private_torch import has_tensor_hooks
from ..step.first_update import differing_on_ranks
from .program import Program


class TrainableCheck:
    """Finds parameters that no optimizer trains, what was replaced after setup, and loss scalers of the user's own.

    Args:
        program: has models and optimizers as attributes.
        ctx: of the run, with models and optimizers.
    """

    def __init__(self, program: Program, ctx: RunContext) -> None:
        self._program, self._ctx = program, ctx
        self._data = {name: vars(program).get(name) for name in ("train_dataloader", "val_dataloader")}
        self._reported: set[nn.Parameter] = set()

    def __call__(self) -> None:
        """Warn on the main rank of trainable parameters that no optimizer has, if others of their model have one.

        Raises:
            StepError: an attribute that held a model, an optimizer or data at setup holds another one.
            ConfigError: an attribute is a `GradScaler`, and not for `configure_loss_scaler`; or FSDP2 would not call
                the hook of a parameter.
        """
        ctx = self._ctx
        for name, model in ctx.models.items():
            for path, parameter in model.named_parameters() if sharded_roots(model) else ():
                if isinstance(parameter, DTensor) and has_tensor_hooks(parameter):
                    raise ConfigError(
                        f"{name}.{path} has a hook, which is not called for a sharded parameter: change gradients in "
                        "on_gradients_ready(), or use parallel.strategy='ddp'"
                    )
        for name, value in vars(self._program).items():
            if isinstance(value, torch.amp.GradScaler) and not self._program.overrides_loss_scaler:
                raise ConfigError(
                    f"self.{name} is a GradScaler, but Headway scales the loss itself: remove it, and set "
                    "precision='fp16' (with configure_loss_scaler() for other settings)"
                )
        for name, model in ctx.models.items():
            now = vars(self._program).get(name)
            # `torch.compile` and other wrappers share the parameters.
            if isinstance(now, nn.Module) and set(now.parameters()).isdisjoint(model.parameters()):
                raise StepError(_replaced(name, "model", "change its weights in place"))
        for name, optimizer in ctx.optimizers.items():
            now = vars(self._program).get(name)
            groups = {id(group) for group in optimizer.param_groups}
            if isinstance(now, Optimizer) and groups.isdisjoint(map(id, now.param_groups)):
                raise StepError(_replaced(name, "optimizer", "change its param_groups, or use add_param_group()"))
        for name, loader in self._data.items():
            if vars(self._program).get(name, loader) is not loader:
                advice = "change its dataset, or pass batches of other data to train_step() in a loop() of your own"
                raise StepError(_replaced(name, "dataloader", advice))
        if not ctx.world.is_main:
            return
        held = {
            parameter
            for optimizer in ctx.optimizers.values()
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for name, model in ctx.models.items():
            trainable = {path: each for path, each in unwrap(model).named_parameters() if each.requires_grad}
            missing = {path: each for path, each in trainable.items() if each not in held}
            # A model without an optimizer, such as a teacher, is usual.
            if len(missing) == len(trainable) or self._reported.issuperset(missing.values()):
                continue
            self._reported.update(missing.values())
            first = next(iter(missing))
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            warnings.warn(
                f"{name}.{first}{more} can be trained, but no optimizer has it: pass it to one in "
                "configure_optimizers(), or freeze it, by config.freeze or requires_grad_(False)",
                stacklevel=2,
            )


class ReplicaCheck:
    """Finds parameters that are no longer equal on all ranks, because other code than an optimizer has changed them.

    Args:
        ctx: of the run, with models.
    """

    def __init__(self, ctx: RunContext) -> None:
        self._ctx = ctx

    def __call__(self) -> None:
        """Compare the parameters that every rank has whole. Every rank must call this; waits for the device.

        Raises:
            StepError: some differ.
        """
        ctx = self._ctx
        whole = {
            parameter
            for model in ctx.models.values()
            for parameter in model.parameters()
            if not isinstance(parameter, DTensor)
            and (parameter.is_floating_point() or parameter.is_complex())
            and parameter.itemsize > 1  # torch has no norm for float8
        }
        if names := differing_on_ranks(ctx.models, whole, ctx.mesh.loss):
            raise StepError(
                f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''} differ between the ranks, since code "
                "outside of the optimizers has changed or created them, such as by random numbers, which each rank "
                "draws differently: create parameters in configure_models(), and after other changes call "
                "torch.distributed.broadcast(parameter.data, src=0) on every rank, or draw by a torch.Generator with "
                "the same seed on all"
            )


def _replaced(name: str, kind: str, advice: str) -> str:
    return (
        f"self.{name} was replaced during the run, but Headway continues with the {kind} of configure_{kind}s(): "
        f"{advice}"
    )
