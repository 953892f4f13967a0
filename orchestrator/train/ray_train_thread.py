"""Calls Ray Train from the workers, in one thread of each rank: polls for preemption notices, and reports.

`ray.train.get_preemption_info` and `ray.train.report` are barriers over all ranks, which take up to seconds. Here only
these threads wait for one another, never a step. A call of `report` by the user's code would mix with theirs, and Ray's
checkpoint is a pointer, without the files that the user's code would look for: so both are replaced for it.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import ray.train
import ray.train.collective

from headway.trainer.errors import ConfigError

from ..runs.pointer import Pointer, read_pointer, write_pointer
from .preemption import PreemptionNotice, notice_of

POLL_S = 2.0
_Report = tuple[dict[str, Any], Pointer | None]


class RayTrainThread:
    """Makes all calls of Ray Train's barriers. Every rank must create one; nothing else may call them meanwhile.

    `replace_ray_calls` refuses them in the code of a trainer.

    With reports, the main rank chooses the next call and broadcasts it, so that all ranks make the same one.

    Args:
        is_main: whether this is the main rank.
        on_notice: called in the thread with each notice that names a new node; None: notices are not polled for.
        reports: whether `report` will be called; equal on every rank.
        poll_s: seconds between two polls.
    """

    def __init__(
        self,
        *,
        is_main: bool,
        on_notice: Callable[[PreemptionNotice], None] | None,
        reports: bool,
        poll_s: float | None = None,
    ) -> None:
        self._is_main, self._on_notice, self._reports = is_main, on_notice, reports
        self._poll_s = POLL_S if poll_s is None else poll_s
        self._ended = threading.Event()
        self._queue: queue.SimpleQueue[_Report | None] = queue.SimpleQueue()
        self._next: _Report | None = None
        self._error: Exception | None = None
        self._known: set[str] = set()
        run = self._run if reports else self._poll_until_end
        self._thread = threading.Thread(target=run, name="headway-ray-train", daemon=True)
        self._thread.start()

    def report(self, metrics: Mapping[str, Any], pointer: Pointer | None = None) -> None:
        """Report to Ray Train, without waiting for it. Every rank must call this, equally often.

        Args:
            metrics: numbers by name.
            pointer: the checkpoint that Ray's `Checkpoint` is to point to.

        Raises:
            Exception: an earlier report failed on this rank.
        """
        if self._error is not None:
            raise self._error
        self._queue.put((dict(metrics), pointer))

    def end(self, *, wait: bool) -> None:
        """Stop polling.

        Args:
            wait: first wait until Ray Train has taken all reports; every rank must have made them.

        Raises:
            Exception: a report failed on this rank.
        """
        self._ended.set()
        if self._reports and wait:
            self._queue.put(None)
            self._thread.join()
            if self._error is not None:
                raise self._error

    def _run(self) -> None:
        try:
            while (call := self._choose()) != "end":
                if call == "report":
                    self._report()
                else:
                    self._poll()
        except Exception as error:
            self._error = error

    def _choose(self) -> str:
        """Return the next call, on which all ranks agree; for a report, also take it from the queue."""
        call: str = ""
        if self._is_main:
            try:
                self._next = self._queue.get(timeout=None if self._on_notice is None else self._poll_s)
                call = "end" if self._next is None else "report"
            except queue.Empty:
                call = "poll"
        agreed: str = ray.train.collective.broadcast_from_rank_zero(call)
        if agreed != "poll" and not self._is_main:
            self._next = self._queue.get()
        return agreed

    def _report(self) -> None:
        assert self._next is not None
        metrics, pointer = self._next
        if pointer is None or not self._is_main:
            call_ray(ray.train, "report", metrics)
            return
        with tempfile.TemporaryDirectory(prefix="headway-pointer-") as folder:
            write_pointer(pointer, folder)
            call_ray(ray.train, "report", metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))

    def _poll_until_end(self) -> None:
        while not self._ended.wait(self._poll_s):
            try:
                self._poll()
            except Exception:
                # The group is being shut down, or other code used Ray Train's collectives: no notices from here on.
                return

    def _poll(self) -> None:
        info = ray.train.get_preemption_info()
        if info is None or self._on_notice is None or set(info.preempted_node_ids) <= self._known:
            return
        self._known |= set(info.preempted_node_ids)
        try:
            self._on_notice(notice_of(info))
        except Exception as error:
            # The thread must survive for the next notice. The warning is written to the storage, and may fail.
            with contextlib.suppress(Exception):
                message = f"a preemption notice could not be handled: {type(error).__name__}: {error}"
                warnings.warn(message, stacklevel=2)


class _Replaced:
    """In place of a function of Ray, for the code of the user; Headway calls the original."""

    def __init__(self, name: str, original: Callable[..., Any]) -> None:
        self.name, self.original = name, original


class _RefusedReport(_Replaced):
    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(
            f"{self.name}() was called in the trainer's code: remove it, and return numbers from the steps, or call "
            "self.log(name, number). Headway records them, and reports them to your TorchTrainer or Tuner with each "
            "evaluation and checkpoint"
        )


class _GetCheckpoint(_Replaced):
    def __call__(self) -> None:
        """Return None, as at the start of a new run: whatever follows, Headway restores the run afterwards."""
        warnings.warn(
            f"{self.name}() returns None in the trainer's code: Headway itself restores models, optimizers and the "
            "position in the data. State of your own belongs in state_dict() of a callback",
            stacklevel=2,
        )


def replace_ray_calls() -> None:
    """Replace `report` and `get_checkpoint` of Ray Train, and of Ray Tune in a trial, before a trainer is loaded."""
    # Importing Ray Tune takes a tenth of a second, which workers of `fit` need not spend.
    for module in filter(None, map(sys.modules.get, ("ray.train", "ray.tune"))):
        for name, replacement in (("report", _RefusedReport), ("get_checkpoint", _GetCheckpoint)):
            current = getattr(module, name)
            if not isinstance(current, _Replaced):
                setattr(module, name, replacement(f"{module.__name__}.{name}", current))


def call_ray(module: ModuleType, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a function of `ray.train` or `ray.tune`, also where it has been replaced."""
    function = getattr(module, name)
    return (function.original if isinstance(function, _Replaced) else function)(*args, **kwargs)


def last_pointer(module: ModuleType) -> Pointer | None:
    """Return what the last checkpoint points to that `ray.train` or `ray.tune` has of this run or trial, if any.

    Raises:
        ConfigError: it is not a checkpoint of a Headway run.
    """
    checkpoint = call_ray(module, "get_checkpoint")
    return None if checkpoint is None else read_pointer(checkpoint)
