"""Copy tensors to host memory while training continues, so that a save barely delays it.

Parameters and optimizer state do not change between optimizer steps. In that window a thread copies them (on a GPU, a
separate stream, into pinned memory), and the next optimizer step waits for the rest of the copy. Tensors that may
change earlier, such as buffers in a forward pass, are copied before training continues (on a GPU, the device waits).
"""

from __future__ import annotations

import itertools
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch

from ..errors import CheckpointError
from ..private_torch import foreach_copy_, versions_of

_ALIGNMENT = 64


class _Deferred(NamedTuple):
    """The tensors that are copied while training continues, in columns: an object for each would take longer."""

    names: list[str]
    tensors: list[torch.Tensor]
    copies: list[torch.Tensor]


class Staging:
    """Host memory for copies of tensors, as large as the tensors, reused from save to save.

    No collectives.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._layout: object = None
        self._device: torch.device | None = None
        self._stream: torch.cuda.Stream | None = None

    def begin(
        self,
        tensors: Mapping[str, torch.Tensor],
        layout: object,
        changes_only_on_step: Callable[[torch.Tensor], bool],
        sharded: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> Copy:
        """Start to copy tensors into the memory of the previous copy.

        Args:
            tensors: local tensors by name.
            layout: that of the previous copy only if names, shapes, types and devices of the tensors are the same.
            changes_only_on_step: whether a tensor keeps its value until the optimizer steps.
            sharded: live tensors, by name, whose changes do not show in the local tensors: an operation on a `DTensor`
                in place counts as a change of it, and not of its shard.
        """
        if layout is not self._layout:
            self._buffers, self._layout = _allocate(tensors), layout
            self._device = next((each.device for each in tensors.values() if each.is_cuda), None)
        can_wait = list(map(changes_only_on_step, tensors.values()))
        names = list(itertools.compress(tensors, can_wait))
        copies = list(itertools.compress(self._buffers.values(), can_wait))
        # Detached, a parameter keeps its memory also if a step gives it another one by `parameter.data = ...`.
        deferred = [
            each if type(each) is torch.Tensor else each.detach()
            for each in itertools.compress(tensors.values(), can_wait)
        ]
        first = [name for name, waits in zip(tensors, can_wait, strict=True) if not waits]
        watched = {name: tensor for name, tensor in sharded.items() if changes_only_on_step(tensor)}
        copy = Copy(self._buffers, _Deferred(names, deferred, copies), watched)
        if self._device is None:
            self._copy_now(tensors, first, non_blocking=False)
        else:
            self._stream = self._stream or torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            copy.enqueue(self._stream, first=lambda: self._copy_now(tensors, first, non_blocking=True))
        return copy

    @torch.no_grad()
    def _copy_now(self, tensors: Mapping[str, torch.Tensor], names: Sequence[str], *, non_blocking: bool) -> None:
        if names:
            copies, sources = [self._buffers[name] for name in names], [tensors[name] for name in names]
            foreach_copy_(copies, sources, non_blocking=non_blocking)


def _allocate(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return host memory for each tensor; pinned if it is on a GPU.

    Memory for tensors on the CPU is one block. Many smaller ones would take the places that freed gradients leave in
    the heap, and each backward pass would then get new memory from the kernel, page by page: 20 % slower updates.
    """
    sizes = [-(-each.nbytes // _ALIGNMENT) * _ALIGNMENT for each in tensors.values() if each.is_cpu]
    block = torch.empty(sum(sizes), dtype=torch.uint8)
    begins = itertools.accumulate(sizes, initial=0)
    buffers = {}
    for name, tensor in tensors.items():
        if tensor.is_cpu:
            begin = next(begins)
            buffers[name] = block[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        else:
            buffers[name] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
    return buffers


class Copy:
    """A copy in progress.

    Attributes:
        tensors: the copies by name, on the host; complete once `finish` has returned.
    """

    def __init__(
        self, tensors: dict[str, torch.Tensor], deferred: _Deferred, sharded: Mapping[str, torch.Tensor]
    ) -> None:
        self.tensors = tensors
        self._deferred = deferred
        self._names, self._watched = [*deferred.names, *sharded], [*deferred.tensors, *sharded.values()]
        self._versions = versions_of(self._watched)
        self._changed: str | None = None
        self._error: Exception | None = None
        self._may_change = False
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._copied_event: torch.cuda.Event | None = None
        self._device: torch.device | None = None
        if not deferred.tensors:
            self._done.set()

    def enqueue(self, stream: torch.cuda.Stream, first: Callable[[], None]) -> None:
        """Enqueue the copy on a stream, after all work that is already enqueued on the training's stream.

        Args:
            stream: of the copies.
            first: enqueues copies for which later work of the training waits, on the device.
        """
        self._device = stream.device
        training = torch.cuda.current_stream(stream.device)
        stream.wait_stream(training)
        with torch.cuda.stream(stream):
            first()
            training.wait_stream(stream)
            self._copy()
            # Otherwise the save thread would occupy a core while it waits.
            self._copied_event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._copied_event.record()

    def finish(self) -> None:
        """Finish the copy; called by the save thread. `check` raises its errors."""
        try:
            if self._copied_event is not None:
                # A thread begins with device 0, and would make a context there.
                torch.cuda.set_device(self._device)
                self._copied_event.synchronize()
            else:
                self._copy()
            self._check_versions()
        except Exception as error:
            self._error = error
        finally:
            self._done.set()
            self._deferred, self._names, self._watched = _Deferred([], [], []), [], []

    def check(self) -> None:
        """Check that all tensors were copied at one instant.

        Raises:
            CheckpointError: a tensor was changed during the copy.
        """
        if self._error is not None:
            raise self._error
        if self._changed is not None:
            raise CheckpointError(
                f"{self._changed} was changed while it was being saved, but not by an optimizer step of the trainer: "
                "call trainer.wait_for_snapshot() first, or change it in on_step_end"
            )

    def wait(self) -> None:
        """Wait until the tensors may change; called by the training thread. On a GPU only the device waits."""
        if self._copied_event is None:
            self._done.wait()
            return
        torch.cuda.current_stream(self._device).wait_event(self._copied_event)
        self._check_versions()

    def _check_versions(self) -> None:
        """Record whether a tensor has changed too early. Later calls do nothing."""
        with self._lock:
            if not self._may_change:
                have_changed = map(operator.ne, versions_of(self._watched), self._versions)
                self._changed = next(itertools.compress(self._names, have_changed), None)
                self._may_change = True

    @torch.no_grad()
    def _copy(self) -> None:
        # One call, so that the thread acquires the GIL once, not for every tensor.
        if self._deferred.tensors:
            foreach_copy_(self._deferred.copies, self._deferred.tensors, non_blocking=True)
