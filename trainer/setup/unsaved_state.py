"""Finds state that training steps keep on the trainer, where no checkpoint contains it."""

from __future__ import annotations

import ast
import functools
import inspect
import random
import textwrap
import warnings
from typing import Any

import numpy as np
import torch
from torch import nn

from ..data.dataloader_stream import LoaderStream
from ..data.protocols import BatchStream
from ..distributed.dtensor import unwrap
from ..loop.context import RunContext
from ..private_torch import version_of
from .program import Program

_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


class UnsavedState:
    """Warns, once, of attributes that a `training_step` hands on to the next, such as the hidden state of an RNN.

    A resumed run would begin without them. They are tensors and floats that the step reads before it sets them, and
    tensors that it reads and has changed in place; not flags and counters, which often only make it print. Nothing is
    said if a callback of the user's has a `state_dict`, which may return them.

    And of modules that were made after `configure_models` and change, such as the target network of Q-learning; and of
    tensors that the `forward` of a module hands on to the next one as plain attributes, which are no buffers; and of a
    random generator that a map-style dataset keeps for its rows.

    Args:
        program: the trainer.
        ctx: of the run, set up.
        data: the training data.
    """

    def __init__(self, program: Program, ctx: RunContext, data: BatchStream) -> None:
        self._program, self._ctx = program, ctx
        self._generator = _generator_of(data)
        self._handed_on, self._read = _attributes_of(getattr(type(program), "training_step", None))
        self._versions = self._tensors()
        self._modules: dict[str, tuple[nn.Module, list[int | None]]] = {}
        self._changed_modules()
        self._handing: list[tuple[str, nn.Module, str]] | None = None
        self._kept: dict[str, Any] = {}
        self._has_warned = ctx.run_dir is None or not ctx.world.is_main

    def __call__(self) -> None:
        """Warn if there are any; called before a checkpoint."""
        if self._has_warned or self._ctx.callbacks.have_own_state():
            return
        if (problem := self._problem()) is not None:
            self._has_warned = True
            warnings.warn(problem, stacklevel=2)

    def _problem(self) -> str | None:
        """Return what no checkpoint has, and what to do about it; None if nothing is missing."""
        if modules := self._changed_modules():
            return (
                f"self.{modules[0]} is a model that changes during the run, but no checkpoint has it, so that a "
                "resumed run begins with another one: make it in configure_models(), and change its weights in place"
            )
        if names := self._kept_by_modules():
            return (
                f"{names[0]} is a tensor that forward() hands on to the next one, but as a plain attribute it is in no "
                "checkpoint, so that a resumed run begins without it: use register_buffer()"
            )
        if self._generator is not None:
            return (
                f"rows draw random numbers from {self._generator}, but no checkpoint has a generator of a dataset, so "
                "that a resumed run draws other numbers: draw from the global ones of random, numpy.random or torch"
            )
        managed = {*self._ctx.models, *self._ctx.optimizers, *self._ctx.lr_stepping.schedulers}
        attributes = {name for name, value in vars(self._program).items() if _is_state(value)} - managed
        changed = {name for name, version in self._tensors().items() if self._versions.get(name, version) != version}
        names = sorted((attributes & self._handed_on) | changed)
        if not names:
            return None
        it = "them" if names[1:] else "it"
        return (
            f"training_step hands {', '.join(f'self.{name}' for name in names)} on to the next one, but no "
            f"checkpoint has {it}, so that a resumed run begins without {it}: return {it} from state_dict() of a "
            "callback, see docs/checkpoints.md under Custom state"
        )

    def _changed_modules(self) -> list[str]:
        """Return the names of modules that no checkpoint has, and that have changed since the last call."""
        before, self._modules = self._modules, {}
        models = set(map(id, self._ctx.models.values()))
        others = {
            name: value
            for name, value in vars(self._program).items()
            if isinstance(value, nn.Module) and id(value) not in models
        }
        if not others:
            return []
        saved = {id(tensor) for model in self._ctx.models.values() for tensor in model.parameters()}
        for name, value in others.items():
            if (own := list(value.parameters())) and id(own[0]) not in saved:
                self._modules[name] = value, [version_of(tensor) for tensor in (*own, *value.buffers())]
        return [name for name, now in self._modules.items() if name in before and now != before[name]]

    def _kept_by_modules(self) -> list[str]:
        """Return the tensors that modules hand on as plain attributes, and have replaced since the last call."""
        if self._handing is None:
            resets = _names_in(getattr(type(self._program), "training_step", None))
            self._handing = [
                (path, module, attribute)
                for name, model in self._ctx.models.items()
                for path, module in unwrap(model).named_modules(prefix=name)
                for attribute in sorted(_attributes_of(type(module).forward)[0] - resets)
            ]
        values = {f"{path}.{attribute}": vars(module).get(attribute) for path, module, attribute in self._handing}
        before, self._kept = self._kept, {name: each for name, each in values.items() if isinstance(each, torch.Tensor)}
        return [name for name, value in self._kept.items() if name in before and before[name] is not value]

    def _tensors(self) -> dict[str, int | None]:
        """Return the versions of the tensors that the step reads and never sets."""
        found = {name: vars(self._program).get(name) for name in self._read}
        return {
            name: version_of(value)
            for name, value in found.items()
            if isinstance(value, torch.Tensor) and not value.is_inference()
        }


def _generator_of(data: BatchStream) -> str | None:
    """Return the name of a generator that a dataset keeps, and from which its rows draw without seeding it again."""
    for dataset in data.datasets() if isinstance(data, LoaderStream) else ():
        names = _names_in(getattr(dataset, "__getitem__", None)) | _names_in(getattr(dataset, "__getitems__", None))
        if names.isdisjoint(("seed", "manual_seed")):
            for name in sorted(names.intersection(getattr(dataset, "__dict__", ()))):
                if isinstance(vars(dataset)[name], _GENERATORS):
                    return f"{type(dataset).__name__}.{name}"
    return None


def _names_in(function: Any) -> set[str]:
    """Return the attributes that a function names, such as the hidden state that it resets before a forward pass."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return set() if code is None else set(code.co_names)


def _is_state(value: Any) -> bool:
    if isinstance(value, (tuple, list, dict)):
        return any(map(_is_state, value.values() if isinstance(value, dict) else value))
    return isinstance(value, (float, torch.Tensor, np.ndarray))


class _Attributes(ast.NodeVisitor):
    """Collects the attributes of `self` in the order in which a function reads and sets them."""

    def __init__(self, function: ast.FunctionDef) -> None:
        self._owner = function.args.args[0].arg if function.args.args else ""
        self.read_first: set[str] = set()
        self.are_set: set[str] = set()
        for each in function.body:
            self.visit(each)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Visit the value first, as Python does."""
        self.visit(node.value)
        for target in node.targets:
            self.visit(target)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Count the target as read, and then set."""
        if (name := self._name(node.target)) and name not in self.are_set:
            self.read_first.add(name)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Count an attribute."""
        if not (name := self._name(node)):
            self.generic_visit(node)
        elif not isinstance(node.ctx, ast.Load):
            self.are_set.add(name)
        elif name not in self.are_set:
            self.read_first.add(name)

    def _name(self, node: ast.expr) -> str:
        is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == self._owner
        return node.attr if is_own else ""  # type: ignore[attr-defined]


@functools.cache
def _attributes_of(function: Any) -> tuple[set[str], set[str]]:
    """Return the attributes of `self` that a function reads before it sets them, and those that it only reads."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return set(), set()
    if not isinstance(tree, ast.FunctionDef):
        return set(), set()
    found = _Attributes(tree)
    return found.read_first & found.are_set, found.read_first - found.are_set
