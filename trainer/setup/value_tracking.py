"""Finds out which code gives values to the tensors of a model that is created on the meta device."""

from __future__ import annotations

import copy
import gc
import inspect
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..checkpoints.rng import preserve_rng
from ..distributed.parallelize import named_tensors
from ..private_torch import is_conversion, written_arguments
from .weight_init import WITHOUT_VALUES, aten, reset_parameters

_NOT_THE_USERS = (
    str(Path(torch.__file__).parent), str(sys.modules["typing_extensions"].__file__), warnings.__file__, copy.__file__,
    __file__,
)  # fmt: skip
"""Files of frames that are not named: torch, its decorators for deprecated functions, `copy` and this module."""
_FROM_VALUES = (torch.tensor, torch.as_tensor, torch.asarray)
"""They call no operator on the meta device, so that a `TorchDispatchMode` does not see them."""
_IS_META = inspect.getattr_static(torch.Tensor, "is_meta").__get__


@dataclass(frozen=True, slots=True)
class Writer:
    """The code that last gave values to a tensor.

    Attributes:
        module: whose `reset_parameters` it was; None for other code.
        place: function and line of the nearest code outside torch, for messages.
    """

    module: weakref.ref[nn.Module] | None
    place: str


class ValueTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the last writer of every tensor that is created or changed in this context.

    Writes through views and through `.data` count, because tensors are identified by their storage.

    Attributes:
        loaded: the code that copied values from a tensor that has some, as `load_state_dict` does; None if none has.
        has_drawn: whether any code drew random numbers for the meta device, after each of which this advances torch's
            generator.
        seeded: the first code that drew random numbers after code that seeded the generator, or advanced it by numbers
            of a tensor with values, so that later draws would repeat neither; None if none has.
        drawn_otherwise: after `lost`, the first code whose random numbers the default initialization would draw in
            another order or dtype; None if it would draw the same.
        communicates: whether the ranks exchange something, such as in a barrier around a download.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._writers: weakref.WeakKeyDictionary[torch.UntypedStorage, Writer | None] = weakref.WeakKeyDictionary()
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}
        self._outermost: FrameType | None = None
        self.loaded: Writer | None = None
        self.seeded: Writer | None = None
        self._generator: torch.Tensor | None = None
        self.has_drawn = False
        self.drawn_otherwise: Writer | None = None
        self.communicates = False
        self._draws = _Draws()
        self._unseen = _Unseen(self)

    def __enter__(self) -> ValueTracker:
        self._outermost = sys._getframe(1)
        self._generator = torch.get_rng_state()
        super().__enter__()  # type: ignore[no-untyped-call]
        self._unseen.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        self._outermost = None
        self._unseen.__exit__(*exception)  # type: ignore[no-untyped-call]
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        if self.has_drawn:
            self._check_generator(Writer(None, "configure_models"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.communicates |= func.namespace == "c10d"
        result = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags and any(each.is_meta for each in _tensors(result)):
            self.has_drawn = True
            writer = self.find_writer()
            self._check_generator(writer)
            others = [each for each in args if not isinstance(each, torch.Tensor)]
            for each in _tensors(result):
                self._draws.add(f"{func} {others}", each, writer)
            if self.seeded is None:
                # Marks this draw, which takes no number on the meta device: a seed that is set again sets it back.
                torch.rand((), device="cpu")
                self._generator = torch.get_rng_state()
        inputs = {id(each.untyped_storage()) for each in _tensors((args, kwargs))}
        for each in _written(func, args, kwargs):
            self._writers[each.untyped_storage()] = self.find_writer()
            if func.overloadpacket is aten.copy_ and each.is_meta and not args[1].is_meta:
                self.loaded = self.find_writer()
        for each in _tensors(result):
            if each.is_meta:
                self._made[id(each)] = weakref.ref(each)
            if id(each.untyped_storage()) in inputs or func.overloadpacket in WITHOUT_VALUES:
                continue
            # Another dtype of the same values.
            self._writers[each.untyped_storage()] = (
                self.writer_of(args[0]) if is_conversion(func) else self.find_writer()
            )
        return result

    def _check_generator(self, writer: Writer) -> None:
        assert self._generator is not None
        if self.seeded is None and not torch.equal(torch.get_rng_state(), self._generator):
            self.seeded = writer

    @property
    def num_draws(self) -> int:
        """How often random numbers were drawn."""
        return len(self._draws)

    def record_draw(self, function: str, tensor: torch.Tensor, writer: Writer) -> None:
        """Record random numbers that no operator has drawn."""
        self._draws.add(function, tensor, writer)

    def record(self, tensor: torch.Tensor, writer: Writer) -> None:
        """Record the writer of a tensor that no operator has changed."""
        self._made[id(tensor)] = weakref.ref(tensor)
        self._writers[tensor.untyped_storage()] = writer

    def writer_of(self, tensor: torch.Tensor) -> Writer | None:
        """Return the code that last gave values to a tensor; None if none has."""
        return self._writers.get(tensor.untyped_storage())

    def lost(self, models: Mapping[str, nn.Module]) -> dict[str, Writer]:
        """Return the tensors whose values the default initialization would not reproduce, by name.

        That is `reset_parameters` of every module: it reproduces a value that the same method of the same module gave.
        """
        tensors = {
            name: tensor
            for name, tensor in named_tensors(models)
            if tensor.is_meta and not isinstance(tensor, (UninitializedParameter, UninitializedBuffer))
        }
        built = {name: writer for name, tensor in tensors.items() if (writer := self.writer_of(tensor)) is not None}
        if built and all(writer.module is not None for writer in built.values()):
            drawn, self._draws = self._draws, _Draws()
            with preserve_rng(), torch.no_grad(), self:
                for model in models.values():
                    reset_parameters(model)
            # Without a value in the constructor, a tensor has none in plain PyTorch.
            if len(built) == len(tensors):
                self.drawn_otherwise = drawn.first_unlike(self._draws, tensors.values())
        lost = {}
        for name, writer in built.items():
            reset = self.writer_of(tensors[name])
            if writer.module is None or reset is None or reset.module != writer.module:
                lost[name] = writer
        return lost

    def elsewhere(self, models: Mapping[str, nn.Module]) -> Writer | None:
        """Return who gave values to a tensor that still exists and is neither a parameter nor a buffer, if any."""
        held = {
            id(tensor.untyped_storage())
            for _, tensor in named_tensors(models)
            if not isinstance(tensor, (UninitializedParameter, UninitializedBuffer))
        }

        def others() -> Iterator[torch.Tensor]:
            for reference in self._made.values():
                if (tensor := reference()) is not None and id(tensor.untyped_storage()) not in held:
                    yield tensor

        if next(others(), None) is None:
            return None
        # Temporary tensors in reference cycles.
        gc.collect()
        found = next(others(), None)
        return None if found is None else self.writer_of(found) or Writer(None, "configure_models")

    def find_writer(self) -> Writer:
        """Return the code that called the caller of this method."""
        inner = sys._getframe(2)
        frame: FrameType | None = inner
        while (
            frame is not None and frame is not self._outermost and frame.f_code.co_filename.startswith(_NOT_THE_USERS)
        ):
            frame = frame.f_back
        place = "configure_models"
        if frame is not None and frame is not self._outermost:
            place = f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
        return Writer(_resetting(inner, self._outermost), place)


class _Draws:
    """The random numbers that some code has drawn on the meta device, in their order."""

    def __init__(self) -> None:
        self._drawn: list[tuple[str, torch.Size, torch.dtype]] = []
        self._writers: list[Writer] = []
        self._last: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._drawn)

    def add(self, function: str, tensor: torch.Tensor, writer: Writer) -> None:
        """Add the numbers that a function has drawn for a tensor."""
        self._last[tensor.untyped_storage()] = len(self._drawn)
        self._drawn.append((function, tensor.shape, tensor.dtype))
        self._writers.append(writer)

    def first_unlike(self, other: _Draws, tensors: Iterable[torch.Tensor]) -> Writer | None:
        """Return the first code by which tensors get other numbers than by other draws, if any does."""
        storages = [each.untyped_storage() for each in tensors]
        last, others_last = ([draws._last.get(each, -1) for each in storages] for draws in (self, other))
        unlike = [i for i, j in zip(last, others_last, strict=True) if i != j]
        # Draws after the last one that counts have no effect.
        used = self._drawn[: max(last, default=-1) + 1]
        pairs = zip(used, other._drawn, strict=False)
        unlike += [i for i, (drawn, others) in enumerate(pairs) if drawn != others]
        return self._writers[max(min(unlike), 0)] if unlike and self._writers else None


class _Unseen(TorchFunctionMode):
    """Reports what a `TorchDispatchMode` does not see on the meta device.

    These are tensors that were made from Python values, such as `torch.tensor(0.5)`, and those that functions of
    `torch.nn.init` would change: `orthogonal_`, `trunc_normal_`, `sparse_` and `dirac_` ask whether a tensor is on the
    meta device, and then return without an operator.
    """

    def __init__(self, tracker: ValueTracker) -> None:
        super().__init__()
        self._tracker = tracker

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _FROM_VALUES and result.is_meta and not any(True for _ in _tensors(args)):
            self._tracker.record(result, self._tracker.find_writer())
        elif func == _IS_META and result and (code := sys._getframe(1).f_code).co_filename == nn.init.__file__:
            writer = self._tracker.find_writer()
            # Of them, only trunc_normal_ could be repeated on the shards of a weight, in `reset_parameters`.
            can_repeat = code.co_name == "_no_grad_trunc_normal_"
            self._tracker.record_draw(code.co_name, args[0], writer)
            self._tracker.record(args[0], writer if can_repeat else Writer(None, writer.place))
        return result


def _resetting(frame: FrameType | None, outermost: FrameType | None) -> weakref.ref[nn.Module] | None:
    """Return the module whose `reset_parameters` is the nearest in a stack of calls, if any.

    None if it was called with arguments: the default initialization passes none.
    """
    owner: nn.Module | None = None
    has_arguments = False
    while frame is not None and frame is not outermost:
        is_reset = frame.f_code.co_name == "reset_parameters"
        if (
            is_reset
            and isinstance(found := frame.f_locals.get("self"), nn.Module)
            and (found is owner or owner is None)
        ):
            # The outermost call, which may pass arguments to that of the base class.
            owner, has_arguments = found, _has_arguments(frame, found)
        frame = frame.f_back
    return None if owner is None or has_arguments else weakref.ref(owner)


def _has_arguments(frame: FrameType, owner: nn.Module) -> bool:
    """Whether a method was called with other values than its defaults."""
    name, code = frame.f_code.co_name, frame.f_code
    functions = [vars(cls)[name] for cls in type(owner).__mro__ if name in vars(cls)]
    function = next((each for each in functions if getattr(each, "__code__", None) is code), None)
    if function is None:
        return code.co_argcount + code.co_kwonlyargcount > 1
    values = frame.f_locals
    return any(
        bool(values.get(name))
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        else values[name] is not each.default
        for name, each in list(inspect.signature(function).parameters.items())[1:]
        if name in values
    )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yield the arguments that an operator changes in place."""
    for i, name in written_arguments(func):
        yield from _tensors(args[i] if i < len(args) else kwargs.get(name))
