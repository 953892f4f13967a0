"""Encode one part's state as a pickled structure and named tensors, and decode it.

In the structure every tensor is replaced by its name, so any nesting is restored exactly. The tensors are written by
Distributed Checkpoint, which reads them on any number of ranks. Unpickling can run code: load only checkpoints that you
trust.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch.distributed.tensor import DTensor

from ..errors import CheckpointError

_LEAVES = frozenset((int, float, bool, str, bytes, type(None)))


@runtime_checkable
class SupportsLoadTarget(Protocol):
    """A part that provides tensors for a checkpoint to be read into before `load_state_dict`."""

    def load_target(self, path: tuple[str, ...], size: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the tensor to fill, which may be sharded or live; None to let the store allocate one.

        Args:
            path: keys of the tensor in the part's nested state.
            size: size of the full tensor, over all ranks.
            dtype: saved dtype of the tensor.
        """


def encode_state(part: str, state: Any) -> tuple[Callable[[], bytes], dict[str, torch.Tensor]]:
    """Split a state into a function that returns its pickled structure, and its tensors by name ("part/key/key").

    Later changes of the state do not affect the structure. A structure of plain containers, as models and optimizers
    have, is pickled only when the function is called, possibly in another thread.

    Raises:
        CheckpointError: an object cannot be pickled; the message names the part and the keys of the object.
    """
    names = _Names(part)
    try:
        copy = _plain_copy(state, part, names, {})
    except _NotPlain:
        pass
    else:
        return functools.cache(lambda: _pickled(copy, names)), names.tensors
    names = _Names(part)
    for path, tensor in iter_tensors(state):
        names.add("/".join((part, *path)), tensor)
    try:
        structure = _pickled(state, names)
    except Exception as error:
        path, value = _first_unpicklable(state)
        where = f"part {part!r}" + (f", key {'.'.join(path)!r}" if path else "")
        raise CheckpointError(
            f"{where} holds a {type(value).__module__}.{type(value).__qualname__}, which cannot be pickled "
            f"({type(error).__name__}: {error}); remove it from state_dict()"
        ) from error
    return lambda: structure, names.tensors


class _Names:
    """The names of the tensors of one part."""

    def __init__(self, part: str) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._part = part
        self._names: dict[int, str] = {}  # by id, so the named tensors are kept alive below
        self._named: list[torch.Tensor] = []

    def add(self, wanted: str, tensor: torch.Tensor) -> str:
        """Return the tensor's name; a new tensor gets the wanted name, or the next free one."""
        if (known := self._names.get(id(tensor))) is not None:
            return known
        name, count = wanted, 1
        while name in self.tensors:
            name, count = f"{wanted}#{count}", count + 1
        self.tensors[name] = tensor.detach()
        self._names[id(tensor)] = name
        self._named.append(tensor)
        return name

    def of(self, tensor: torch.Tensor) -> str:
        """Return the name of a tensor."""
        # Tensors inside objects have no key path; all ranks encounter them in the same order.
        return self.add(f"{self._part}/#", tensor)


class _NotPlain(Exception):
    """A state contains something other than leaves, tensors, dicts, lists and tuples."""


def _plain_copy(value: Any, path: str, names: _Names, copies: dict[int, Any]) -> Any:
    """Copy the containers of a state, shared ones once, and name its tensors."""
    if isinstance(value, torch.Tensor):
        names.add(path, value)
        return value
    if (known := copies.get(id(value))) is not None:
        return known
    kind = type(value)
    if kind is dict:
        by_key: dict[Any, Any] = {}
        copies[id(value)] = by_key
        for key, each in value.items():
            if type(key) not in _LEAVES:
                raise _NotPlain
            by_key[key] = each if type(each) in _LEAVES else _plain_copy(each, f"{path}/{key}", names, copies)
        return by_key
    if kind is list or kind is tuple:
        each_of = [
            each if type(each) in _LEAVES else _plain_copy(each, f"{path}/{index}", names, copies)
            for index, each in enumerate(value)
        ]
        return copies.setdefault(id(value), each_of if kind is list else tuple(each_of))
    if kind in _LEAVES:
        return value
    raise _NotPlain


def _pickled(state: Any, names: _Names) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream, names).dump(state)
    return stream.getvalue()


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, names: _Names) -> None:
        super().__init__(stream, protocol=5)
        self._names = names

    def persistent_id(self, obj: Any) -> str | None:
        return self._names.of(obj) if isinstance(obj, torch.Tensor) else None


def decode_state(structure: bytes, tensor_of: Callable[[str], torch.Tensor]) -> Any:
    """Rebuild a state; `tensor_of` is called once for each tensor name."""
    given: dict[str, torch.Tensor] = {}

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: str) -> torch.Tensor:
            if pid not in given:
                given[pid] = tensor_of(pid)
            return given[pid]

    return Unpickler(io.BytesIO(structure)).load()


def allocate_target(
    part: str, owner: object, live: Mapping[str, torch.Tensor], name: str, size: torch.Size, dtype: torch.dtype
) -> torch.Tensor:
    """Return the tensor into which the tensor `name` of a checkpoint is read.

    Only a part itself may provide the live tensor: two parts may share one, such as an average that still equals its
    model.
    """
    if isinstance(owner, SupportsLoadTarget):
        placed = owner.load_target(tuple(name[len(part) + 1 :].split("/")), size, dtype)
        if placed is not None:
            return placed
    like = live.get(name)
    if isinstance(like, DTensor) and like.shape == size:
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    return torch.empty(size, dtype=dtype)


def iter_tensors(state: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """Yield every tensor in nested dicts, lists and tuples, with its keys."""
    if isinstance(state, torch.Tensor):
        yield path, state
    elif isinstance(state, (dict, Mapping)):  # dict first: a faster check
        for key, value in state.items():
            if type(value) not in _LEAVES:
                yield from iter_tensors(value, (*path, str(key)))
    elif isinstance(state, (list, tuple)):
        for index, value in enumerate(state):
            if type(value) not in _LEAVES:  # a generator's state has 600 of them
                yield from iter_tensors(value, (*path, str(index)))


def _first_unpicklable(state: Any) -> tuple[tuple[str, ...], Any]:
    """Return the keys of the first object that cannot be pickled, and the object."""
    children: list[tuple[str, Any]] = []
    if isinstance(state, Mapping):
        children = [(str(key), value) for key, value in state.items()]
    elif isinstance(state, (list, tuple)):
        children = [(str(index), value) for index, value in enumerate(cast(list[Any], state))]
    for key, value in children:
        if not isinstance(value, torch.Tensor) and not _pickles(value):
            path, culprit = _first_unpicklable(value)
            return (key, *path), culprit
    return (), state


def _pickles(value: Any) -> bool:
    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> str | None:
            return "tensor" if isinstance(obj, torch.Tensor) else None

    try:
        Pickler(io.BytesIO(), protocol=5).dump(value)
    except Exception:
        return False
    return True
