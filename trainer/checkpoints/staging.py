"""Copies of tensors that are taken while training goes on, so that a save costs it next to nothing.

Parameters and moments hold still from one optimizer step to the next. In that window a thread copies them (on a GPU a
stream of its own does, into pinned memory); only the optimizer has to wait, for what is not copied by then. Whatever
may change earlier, as buffers do in a forward pass, is copied at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from ..distributed.dtensor import to_local
from ..errors import CheckpointError


class _Buffer(NamedTuple):
    """Host memory for one tensor: sharded as that is, and this rank's part of it."""

    whole: torch.Tensor
    own: torch.Tensor


class _Later(NamedTuple):
    """A tensor that is to be copied while training goes on."""

    name: str
    tensor: torch.Tensor
    version: int
    own: torch.Tensor
    copy: torch.Tensor


class Staging:
    """The host memory that tensors are copied to, kept from one copy to the next: as much as the tensors take.

    Of one rank; no collective.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, _Buffer] = {}
        self._stream: torch.cuda.Stream | None = None

    def begin(
        self, tensors: Mapping[str, torch.Tensor], *, changes_only_on_step: Callable[[torch.Tensor], bool]
    ) -> Copy:
        """Begins to copy tensors. The copy before this one must not be needed any more.

        Args:
            tensors: by name; sharded ones are copied shard by shard, and come out sharded alike.
            changes_only_on_step: whether a tensor keeps its value until the optimizer steps.
        """
        before, self._buffers = self._buffers, {}
        later = []
        for name, tensor in tensors.items():
            own, buffer = to_local(tensor), before.get(name)
            if buffer is None or buffer.own.shape != own.shape or buffer.own.dtype != own.dtype:
                buffer = _buffer(tensor, own)
            self._buffers[name] = buffer
            if changes_only_on_step(tensor):
                later.append(_Later(name, tensor, tensor._version, own, buffer.own))
            else:
                buffer.own.copy_(own)
        copy = Copy({name: each.whole for name, each in self._buffers.items()}, later)
        if any(each.own.is_cuda for each in later):
            self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
            copy.enqueue(self._stream)
        return copy


def _buffer(tensor: torch.Tensor, own: torch.Tensor) -> _Buffer:
    if own.is_cuda and tensor is own:
        whole = torch.empty_like(own, device="cpu", pin_memory=True, requires_grad=False)
    else:
        whole = torch.empty_like(tensor, device="cpu", requires_grad=False)
        if own.is_cuda:
            whole._local_tensor = to_local(whole).pin_memory()  # type: ignore[attr-defined]
    return _Buffer(whole, to_local(whole))


class Copy:
    """One copy, on its way.

    Attributes:
        tensors: the copies by name, on the host; whole once `finish` has returned.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], later: Sequence[_Later]) -> None:
        self.tensors = tensors
        self._later = later
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
            self._check_versions()
        except Exception as error:
            self._error = error
        finally:
            self._done.set()
            self._later = ()

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
                "call trainer.wait_for_snapshot() before, or change it in on_step_end"
            )

    def wait(self) -> None:
        """Waits until the tensors may change; called by the thread that trains. On a GPU only the device waits."""
        if self._arrived is None:
            self._done.wait()
            return
        torch.cuda.current_stream().wait_event(self._arrived)
        self._check_versions()

    def _check_versions(self) -> None:
        """Finds out whether a tensor was changed too early; the thread that comes first knows."""
        with self._looking:
            if not self._may_change:
                changed = (each.name for each in self._later if each.tensor._version != each.version)
                self._changed = next(changed, None)
                self._may_change = True

    @torch.no_grad()
    def _copy(self) -> None:
        # In one call, so that the thread does not ask for the interpreter before every tensor.
        if self._later:
            copies, tensors = [each.copy for each in self._later], [each.own for each in self._later]
            torch._foreach_copy_(copies, tensors, non_blocking=True)
