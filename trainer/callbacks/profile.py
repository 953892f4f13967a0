"""Trace operators and kernels of some updates with PyTorch's profiler."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerAction, ProfilerActivity, profile

from ..errors import ConfigError
from ..private_torch import memory_history
from .base import Callback

if TYPE_CHECKING:
    from ..trainer import Trainer

_MOST_ALLOCATIONS = 100_000


class Profile(Callback):
    """Writes a trace of some updates to `<run_dir>/profile/steps-<first>-<last>-rank<rank>.json`.

    Open it at https://ui.perfetto.dev or chrome://tracing. Every update is an event `ProfilerStep#<step>` that starts
    at the end of the previous update, so it includes the wait for data. The update before the first one warms up the
    profiler. A skipped update has its own event, with the same number as the next one. A run that ends inside the
    traced updates writes a partial trace, whose last event covers the end of the run.

    Args:
        steps: the first and the last update to trace, counted from 1 as in the log.
        ranks: the ranks that write a trace.
        record_shapes: whether to record the input shapes of operators.
        with_stack: whether to record Python stacks, which slows operators down.
        memory: on CUDA also write a snapshot of all allocations, `...-memory.pickle`, for
            https://pytorch.org/memory_viz.

    Attributes:
        steps: may be set during training, on the ranks that trace, by a hook or another thread.

    Raises:
        ConfigError: `steps` is not a valid pair; or, at setup, the trainer has no `run_dir`.

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
            raise ConfigError(f"steps must be the first and the last update to trace, such as (10, 12), got {steps!r}")
        self.steps: tuple[int, int] = steps
        self._ranks = ranks
        self._record_shapes, self._with_stack, self._memory = record_shapes, with_stack, memory
        self._profiler: profile | None = None
        self._last = 0

    def on_setup_end(self, trainer: Trainer[Any]) -> None:
        """Check that the trainer has a run directory."""
        if trainer.run_dir is None:
            raise ConfigError("run_dir is not set, and Profile writes its traces there: pass run_dir to the trainer")

    def on_step_start(self, trainer: Trainer[Any]) -> None:
        """Start at the update before the first one, or later if the run resumes inside the traced updates."""
        if self._profiler is None and trainer.world.rank in self._ranks:
            first, last = self.steps
            if first - 1 <= trainer.global_step + 1 <= last:
                self._begin(trainer, first, last)

    def on_step_end(self, trainer: Trainer[Any]) -> None:
        """Advance the profiler; write the trace after the last update."""
        if self._profiler is not None:
            if trainer.global_step >= self._last:
                self._finish()
            else:
                self._profiler.step()

    def on_step_skipped(self, trainer: Trainer[Any], reason: str) -> None:
        """End the event of the skipped update; the next one has the same number."""
        if self._profiler is not None:
            self._profiler.step_num -= 1
            self._profiler.step()

    def on_fit_end(self, trainer: Trainer[Any], error: BaseException | None) -> None:
        """Write a partial trace, if one was started."""
        self._finish()

    def _begin(self, trainer: Trainer[Any], first: int, last: int) -> None:
        upcoming = trainer.global_step + 1
        begin = max(first, upcoming)
        name = f"steps-{begin}-{last}-rank{trainer.world.rank}"
        path = f"{str(trainer.run_dir).rstrip('/')}/profile/{name}"
        is_cuda = trainer.device.type == "cuda"

        def write(profiler: profile) -> None:
            _write(f"{path}.json", profiler.export_chrome_trace)
            if write_memory is not None:
                _write(f"{path}-memory.pickle", write_memory)
            trainer.print(f"profile: {path}.json")

        write_memory = memory_history(most_allocations=_MOST_ALLOCATIONS) if is_cuda and self._memory else None
        self._last = last
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])],
            schedule=lambda step: ProfilerAction.WARMUP if step < begin else ProfilerAction.RECORD,
            on_trace_ready=write,
            record_shapes=self._record_shapes,
            with_stack=self._with_stack,
            profile_memory=self._memory,
        )
        # Number the events like the run's updates; torch has no public API for this.
        self._profiler.step_num = begin - 1
        self._profiler.start()
        if upcoming == begin:
            self._profiler.step()

    def _finish(self) -> None:
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.stop()


def _write(path: str, export: Callable[[str], object]) -> None:
    """Export to a local path, or to a temporary file that is then copied to a remote one."""
    path = path.removeprefix("file://")
    if "://" not in path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        export(path)
        return
    from fsspec.core import url_to_fs

    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/{path.rsplit('/', 1)[1]}"
        export(file)
        fs, target = url_to_fs(path)
        fs.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
        fs.put_file(file, target)
