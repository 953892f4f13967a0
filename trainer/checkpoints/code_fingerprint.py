"""Digests of Python code, to compare it between ranks and with an earlier run.

Ranks compare bytecode: a class from a user's file is sent to machines that lack the file or have an old version of it.
A resumed run compares source: bytecode differs between versions of Python, and tools such as pytest rewrite it in some
processes only.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

_DO_NOT_AFFECT_LEARNING = (
    "validation_step", "num_tokens", "flops_per_sample", "flops_per_token", "configure_metrics", "configure_trackers",
)  # fmt: skip


def method_digests(cls: type) -> dict[str, str]:
    """Return a digest of each method of a class, by name, without methods that Headway defines."""
    digests: dict[str, str] = {}
    for base in cls.__mro__:
        if base.__module__ not in ("builtins", "typing") and not base.__module__.startswith("headway.trainer."):
            digests = _own_methods(base) | digests
    return digests


def learning_code(trainer: type) -> dict[str, str]:
    """Return a digest of the source of each method that affects what is learned, by name; comments do not count.

    Methods of Headway, hooks and measurements are left out, and so are methods without source, such as those of a class
    defined in an interpreter. Functions that the methods call outside the class are not included.
    """
    code: dict[str, str] = {}
    for cls in trainer.__mro__:
        if cls.__module__ in ("builtins", "typing") or cls.__module__.startswith("headway.trainer."):
            continue
        for name, member in vars(cls).items():
            method: Any = getattr(member, "__func__", member)
            if name in code or name in _DO_NOT_AFFECT_LEARNING or name.startswith(("on_", "__")):
                continue
            if inspect.isfunction(method):
                with contextlib.suppress(OSError, TypeError, SyntaxError):
                    tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
                    code[name] = hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]
    return code


@functools.cache
def learning_code_at_first_use(trainer: type) -> dict[str, str]:
    """Return the first `learning_code` of this process, because the file may be edited while the run trains."""
    return learning_code(trainer)


def class_digest(cls: type) -> str:
    """Return one digest of the methods defined in the class itself."""
    return _digest([f"{name} {digest}" for name, digest in sorted(_own_methods(cls).items())])


def _own_methods(cls: type) -> dict[str, str]:
    members = {name: getattr(member, "__func__", member) for name, member in vars(cls).items()}
    return {name: _digest(_parts(each)) for name, each in members.items() if isinstance(each, FunctionType)}


def _digest(parts: Iterator[str] | list[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _parts(function: FunctionType) -> Iterator[str]:
    """Yield the bytecode and plain default values of a function, and of the functions that it wraps."""
    current: Any = function
    while isinstance(current, FunctionType):
        yield from _instructions(current.__code__)
        for value in (*(current.__defaults__ or ()), *(current.__kwdefaults__ or {}).values()):
            is_plain = value is None or isinstance(value, (bool, int, float, str, bytes))
            yield repr(value) if is_plain else type(value).__qualname__
        current = getattr(current, "__wrapped__", None)


def _instructions(code: CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr((code.co_names, code.co_varnames, code.co_freevars))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _instructions(constant)
        else:
            # The order of a set differs between processes.
            yield repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)
