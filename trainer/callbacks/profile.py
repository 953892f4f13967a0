"""What the machine does in chosen updates: a trace of operators and kernels, to be looked at in a browser."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from ..errors import ConfigError
from .base import Callback

if TYPE_CHECKING:
    from ..trainer import Trainer

_MOST_ALLOCATIONS = 100_000


class Profile(Callback):
    """Writes a trace of some updates to `<run_dir>/profile/steps-<first>-<last>-rank<rank>.json`.

    Open it at https://ui.perfetto.dev or chrome://tracing: every update is an event `ProfilerStep#<step>`, which begins
    where the update before ended, so with the wait for its data. The update before the first one warms the profiler up.
    An update that is skipped has an event of its own, with the number that the next one has again.
    An ending inside the chosen updates writes what there is; the last event then is what the ending took.

    Args:
        steps: the first and the last update to trace, counted from 1 as in the log.
        ranks: those that write a trace.
        record_shapes: whether operators carry the shapes of their inputs.
        with_stack: whether they carry the Python stack that called them; slows them down.
        memory: on CUDA also writes a snapshot of all allocations, `...-memory.pickle`, for
            https://pytorch.org/memory_viz.

    Attributes:
        steps: may be set while a run trains, on the ranks that are to trace, by a hook or another thread.

    Raises:
        ConfigError: `steps` is no such pair; or, when the trainer is set up, it has no `run_dir` to write to.

    Example:
        >>> trainer = Digits(config, run_dir="runs/digits", callbacks=[Profile(steps=(10, 12))])
    """

    def __init__(
        self,
        *,
        steps: tuple[int, int],
        ranks: Collection[int] = (0,),
        record_shapes: bool = False,
        with_stack: bool = False,
        memory: bool = False,
    ) -> None:
        if len(steps) != 2 or not 1 <= steps[0] <= steps[1]:
            raise ConfigError(f"steps are the first and the last update to trace, such as (10, 12), not {steps!r}")
        self.steps: tuple[int, int] = steps
        self._ranks = ranks
        self._record_shapes, self._with_stack, self._memory = record_shapes, with_stack, memory
        self._profiler: profile | None = None
        self._last = 0

    def on_setup_end(self, trainer: Trainer[Any]) -> None:
        """Refuses a trainer that writes nothing."""
        if trainer.run_dir is None:
            raise ConfigError("Profile writes its traces to the run's directory: give the trainer a run_dir")

    def on_step_start(self, trainer: Trainer[Any]) -> None:
        """Begins with the update before the first one, or in its midst where a run goes on."""
        if self._profiler is None and trainer.world.rank in self._ranks:
            first, last = self.steps
            if first - 1 <= trainer.global_step + 1 <= last:
                self._begin(trainer, first, last)

    def on_step_end(self, trainer: Trainer[Any]) -> None:
        """Counts, and writes after the last one."""
        if self._profiler is not None:
            if trainer.global_step >= self._last:
                self._finish()
            else:
                self._profiler.step()

    def on_step_skipped(self, trainer: Trainer[Any], reason: str) -> None:
        """Ends the event of an update that was not applied: the next one has the same number."""
        if self._profiler is not None:
            self._profiler.step_num -= 1
            self._profiler.step()

    def on_fit_end(self, trainer: Trainer[Any], error: BaseException | None) -> None:
        """Writes what there is."""
        self._finish()

    def _begin(self, trainer: Trainer[Any], first: int, last: int) -> None:
        upcoming = trainer.global_step + 1
        begin = max(first, upcoming)
        name = f"steps-{begin}-{last}-rank{trainer.world.rank}"
        path = f"{str(trainer.run_dir).rstrip('/')}/profile/{name}"
        is_cuda = trainer.device.type == "cuda"

        def write(profiler: profile) -> None:
            _write(f"{path}.json", profiler.export_chrome_trace)
            if is_cuda and self._memory:
                _write(f"{path}-memory.pickle", torch.cuda.memory._dump_snapshot)
                torch.cuda.memory._record_memory_history(enabled=None)
            trainer.print(f"profile: {path}.json")

        if is_cuda and self._memory:
            torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)
        self._last = last
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])],
            schedule=lambda step: ProfilerAction.WARMUP if step < begin else ProfilerAction.RECORD,
            on_trace_ready=write,
            record_shapes=self._record_shapes,
            with_stack=self._with_stack,
            profile_memory=self._memory,
        )
        # The numbers of its events are those of the run; it cannot be told in another way.
        self._profiler.step_num = begin - 1
        self._profiler.start()
        if upcoming == begin:
            self._profiler.step()

    def _finish(self) -> None:
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.stop()


def _write(path: str, export: Callable[[str], object]) -> None:
    """Has a file made on this machine, and copies it to where it belongs if that is elsewhere."""
    path = path.removeprefix("file://")
    if "://" not in path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        export(path)
        return
    from fsspec.core import url_to_fs

    with tempfile.TemporaryDirectory() as folder:
        made = f"{folder}/{path.rsplit('/', 1)[1]}"
        export(made)
        fs, there = url_to_fs(path)
        fs.makedirs(fs._parent(there), exist_ok=True)
        fs.put_file(made, there)
