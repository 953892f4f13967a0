"""One part's state as bytes and named tensors: structure and tensors part here, and meet again when it is loaded.

The structure is a pickle in which every tensor is only a name. So any nesting comes back exactly as it was, while the
tensors go through Distributed Checkpoint, which reads them at any number of ranks. Unpickling runs what the bytes say:
load only checkpoints of your own.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch.distributed.tensor import DTensor

from .errors import CheckpointError

_LEAVES = (int, float, bool, str, bytes, type(None))


@runtime_checkable
class PlacesTensors(Protocol):
    """A part that says where a tensor of a checkpoint is to be read to, before it gets its state."""

    def place(self, path: tuple[str, ...], size: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
        """Returns the tensor to fill, perhaps sharded, perhaps the live one; None leaves it to the store.

        Args:
            path: the keys that lead to the tensor in the part's state.
            size: of the whole tensor, over all ranks.
            dtype: of the tensor as it was saved.
        """
        ...


def take_apart(part: str, state: Any) -> tuple[bytes, dict[str, torch.Tensor]]:
    """Splits a state into its pickled structure and its tensors by name: "part/key/key".

    Raises:
        CheckpointError: something in it does not pickle, with the part and the keys that lead there.
    """
    names: dict[int, str] = {}  # by id, so whatever has a name is kept alive below
    named: list[torch.Tensor] = []
    tensors: dict[str, torch.Tensor] = {}

    def add(wanted: str, tensor: torch.Tensor) -> str:
        name, count = wanted, 1
        while name in tensors:
            name, count = f"{wanted}#{count}", count + 1
        tensors[name] = tensor.detach()
        names[id(tensor)] = name
        named.append(tensor)
        return name

    for path, tensor in named_tensors(state):
        if id(tensor) not in names:
            add("/".join((part, *path)), tensor)

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> str | None:
            if not isinstance(obj, torch.Tensor):
                return None
            # Tensors inside objects have no path of keys; ranks meet them in the same order.
            return names.get(id(obj)) or add(f"{part}/#", obj)

    stream = io.BytesIO()
    try:
        Pickler(stream, protocol=5).dump(state)
    except Exception as error:
        path, value = _culprit(state)
        where = f"part {part!r}" + (f", key {'.'.join(path)!r}" if path else "")
        raise CheckpointError(
            f"{where} holds a {type(value).__module__}.{type(value).__qualname__}, which does not pickle "
            f"({type(error).__name__}: {error}); leave it out of state_dict()"
        ) from error
    return stream.getvalue(), tensors


def put_together(structure: bytes, tensor_of: Callable[[str], torch.Tensor]) -> Any:
    """Rebuilds a state. `tensor_of` is asked once for each tensor, by name."""
    given: dict[str, torch.Tensor] = {}

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: str) -> torch.Tensor:
            if pid not in given:
                given[pid] = tensor_of(pid)
            return given[pid]

    return Unpickler(io.BytesIO(structure)).load()


def target(
    part: str, owner: object, live: Mapping[str, torch.Tensor], name: str, size: torch.Size, dtype: torch.dtype
) -> torch.Tensor:
    """Returns the tensor that the tensor `name` of a checkpoint is read into.

    Never the live one, unless the part itself offers it: two parts may hold the same tensor, as an average that has not
    moved away from its model yet.
    """
    if isinstance(owner, PlacesTensors):
        placed = owner.place(tuple(name[len(part) + 1 :].split("/")), size, dtype)
        if placed is not None:
            return placed
    like = live.get(name)
    if isinstance(like, DTensor) and like.shape == size:
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    return torch.empty(size, dtype=dtype)


def named_tensors(state: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """Yields every tensor in nested dicts, lists and tuples with the keys that lead to it."""
    if isinstance(state, torch.Tensor):
        yield path, state
    elif isinstance(state, (dict, Mapping)):  # of the two, dict is found out sooner
        for key, value in state.items():
            if type(value) not in _LEAVES:
                yield from named_tensors(value, (*path, str(key)))
    elif isinstance(state, (list, tuple)):
        for index, value in enumerate(state):
            if type(value) not in _LEAVES:  # a generator's state has 600 of them
                yield from named_tensors(value, (*path, str(index)))


def _culprit(state: Any) -> tuple[tuple[str, ...], Any]:
    """The smallest piece of a state that does not pickle, and the keys that lead to it."""
    children: list[tuple[str, Any]] = []
    if isinstance(state, Mapping):
        children = [(str(key), value) for key, value in state.items()]
    elif isinstance(state, (list, tuple)):
        children = [(str(index), value) for index, value in enumerate(cast(list[Any], state))]
    for key, value in children:
        if not isinstance(value, torch.Tensor) and not _pickles(value):
            path, culprit = _culprit(value)
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
