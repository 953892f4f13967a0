"""Copies of tensors that are taken while training goes on, so that a save costs it next to nothing.

Parameters and moments hold still from one optimizer step to the next. In that window a thread copies them (on a GPU a
stream of its own does, into pinned memory); only the optimizer has to wait, for what is not copied by then. Whatever
may change earlier, as buffers do in a forward pass, is copied at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import torch

from .errors import CheckpointError
from .parallel import local


class Staging:
    """The host memory that tensors are copied to, kept from one copy to the next: as much as the tensors take.

    Of one rank; no collective.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None

    def begin(self, tensors: Mapping[str, torch.Tensor], *, is_steady: Callable[[torch.Tensor], bool]) -> Copy:
        """Begins to copy tensors. The copy before this one must not be needed any more.

        Args:
            tensors: by name; sharded ones are copied shard by shard, and come out sharded alike.
            is_steady: whether a tensor keeps its value until the optimizer steps.
        """
        self._buffers = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
        later: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if is_steady(tensor):
                later[name] = tensor
            else:
                local(self._buffers[name]).copy_(local(tensor))
        copy = Copy(dict(self._buffers), later)
        if any(local(tensor).is_cuda for tensor in later.values()):
            self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
            copy.enqueue(self._stream)
        return copy

    def _buffer(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        there, own = self._buffers.get(name), local(tensor)
        if there is not None and (local(there).shape, there.dtype) == (own.shape, own.dtype):
            return there
        if not own.is_cuda:
            return torch.empty_like(tensor, device="cpu", requires_grad=False)
        if tensor is own:
            return torch.empty_like(own, device="cpu", pin_memory=True, requires_grad=False)
        buffer = torch.empty_like(tensor, device="cpu", requires_grad=False)
        buffer._local_tensor = local(buffer).pin_memory()  # type: ignore[attr-defined]
        return buffer


class Copy:
    """One copy, on its way.

    Attributes:
        tensors: the copies by name, on the host; whole once `finish` has returned.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], later: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self._later = later
        self._versions = {name: tensor._version for name, tensor in later.items()}
        self._changed: str | None = None
        self._error: Exception | None = None
        self._may_change = False
        self._looking = threading.Lock()
        self._done = threading.Event()
        self._arrived: torch.cuda.Event | None = None
        if not later:
            self._done.set()

    def enqueue(self, stream: torch.cuda.Stream) -> None:
        """Lets a stream of the device copy, after all that the training's stream has been told so far."""
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._copy()
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def finish(self) -> None:
        """Copies what is left; called by the thread that saves. What goes wrong is raised by `check`."""
        try:
            if self._arrived is not None:
                self._arrived.synchronize()
            else:
                self._copy()
            self._look()
        except Exception as error:
            self._error = error
        finally:
            self._done.set()
            self._later = {}

    def check(self) -> None:
        """Makes sure that the copy is one of a single instant.

        Raises:
            CheckpointError: a tensor was changed under it.
        """
        if self._error is not None:
            raise self._error
        if self._changed is not None:
            raise CheckpointError(
                f"{self._changed} was changed while it was being saved, and not by an optimizer step of the trainer: "
                "call trainer.let_weights_change() before, or change it in on_step_end"
            )

    def hold(self) -> None:
        """Waits until the tensors may change; called by the thread that trains. On a GPU only the device waits."""
        if self._arrived is None:
            self._done.wait()
            return
        torch.cuda.current_stream().wait_event(self._arrived)
        self._look()

    def _look(self) -> None:
        """Finds out whether a tensor was changed too early; the thread that comes first knows."""
        with self._looking:
            if not self._may_change:
                changed = (name for name, each in self._later.items() if each._version != self._versions[name])
                self._changed = next(changed, None)
                self._may_change = True

    @torch.no_grad()
    def _copy(self) -> None:
        # In one call, so that the thread does not ask for the interpreter before every tensor.
        copies = [local(self.tensors[name]) for name in self._later]
        if copies:
            torch._foreach_copy_(copies, [local(tensor) for tensor in self._later.values()], non_blocking=True)
